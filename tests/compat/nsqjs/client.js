// nsqjs behind the lines of ../clients/README.md. Its Writer does not reconnect: a new one is made, as its users do.
'use strict'

const readline = require('readline')
const nsq = require('nsqjs')

const RECONNECT_MS = 100
const messages = []
let writer = null

function tell(event, fields) {
  process.stdout.write(JSON.stringify({ event, ...fields }) + '\n')
}

function options(command) {
  const set = {}
  if (command.tls) {
    set.tls = true
    set.tlsVerification = false
  }
  if (command.compression) {
    set[command.compression] = true
  }
  return set
}

const acts = {
  producer(command) {
    const [host, port] = command.nsqd.split(':')
    const made = new nsq.Writer(host, Number(port), options(command))
    let ended = false
    const again = () => {
      if (ended) return
      ended = true
      tell('gone')
      setTimeout(() => acts.producer(command), RECONNECT_MS)
    }
    made.on('ready', () => tell('connected'))
    made.on('closed', again)
    made.on('error', again)
    made.connect()
    writer = made
  },

  publish(command) {
    const bodies = command.bodies.map((body) => Buffer.from(body, 'base64'))
    const done = (error) => {
      if (error) tell('failed', { n: command.n, why: String(error) })
      else tell('published', { n: command.n })
    }
    if (!writer.ready) done(new Error('not connected'))
    else if (command.how === 'PUB') writer.publish(command.topic, bodies[0], done)
    else if (command.how === 'MPUB') writer.publish(command.topic, bodies, done)
    else writer.deferPublish(command.topic, [bodies[0]], command.delay_ms, done) // 0.13 wants a list here
  },

  consumer(command) {
    const reader = new nsq.Reader(command.topic, command.channel, {
      nsqdTCPAddresses: command.nsqd ? [command.nsqd] : [],
      lookupdHTTPAddresses: command.lookupd ? [command.lookupd] : [],
      lookupdPollInterval: 1,
      maxInFlight: command.max_in_flight,
      messageTimeout: command.msg_timeout_ms,
      ...options(command),
    })
    reader.on('message', (message) => {
      messages.push(message)
      tell('message', {
        message: messages.length,
        id: message.id,
        body: message.body.toString('base64'),
        attempts: message.attempts,
        timestamp: Number(message.timestamp),
      })
    })
    reader.on('error', () => {})
    reader.connect()
  },

  fin: (command) => messages[command.message - 1].finish(),
  req: (command) => messages[command.message - 1].requeue(command.delay_ms, false),
  touch: (command) => messages[command.message - 1].touch(),
  close: () => process.exit(0),
}

const lines = readline.createInterface({ input: process.stdin })
lines.on('line', (line) => {
  const command = JSON.parse(line)
  acts[command.do](command)
})
lines.on('close', () => process.exit(0))
