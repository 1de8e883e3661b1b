// go-nsq behind the lines of ../clients/README.md.
package main

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"log"
	"os"
	"sync"
	"time"

	"github.com/nsqio/go-nsq"
)

type command struct {
	Do          string   `json:"do"`
	Nsqd        string   `json:"nsqd"`
	Lookupd     string   `json:"lookupd"`
	TLS         bool     `json:"tls"`
	Compression string   `json:"compression"`
	N           int      `json:"n"`
	How         string   `json:"how"`
	Topic       string   `json:"topic"`
	Channel     string   `json:"channel"`
	Bodies      [][]byte `json:"bodies"` // base64, as encoding/json has it
	DelayMs     int      `json:"delay_ms"`
	MaxInFlight int      `json:"max_in_flight"`
	TimeoutMs   int      `json:"msg_timeout_ms"`
	Message     int      `json:"message"`
	GivesUp     bool     `json:"gives_up"`
}

type client struct {
	mutex    sync.Mutex
	out      *json.Encoder
	producer *nsq.Producer
	messages []*nsq.Message
}

func (c *client) tell(event map[string]any) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if err := c.out.Encode(event); err != nil {
		log.Fatal(err)
	}
}

func config(cmd command) *nsq.Config {
	config := nsq.NewConfig()
	if !cmd.GivesUp {
		config.MaxAttempts = 0
	}
	config.LookupdPollInterval = 200 * time.Millisecond // also the pause before a direct address is tried again
	config.LookupdPollJitter = 0
	if cmd.TLS {
		config.TlsV1 = true
		config.TlsConfig = &tls.Config{InsecureSkipVerify: true}
	}
	config.Snappy = cmd.Compression == "snappy"
	config.Deflate = cmd.Compression == "deflate"
	if cmd.MaxInFlight > 0 {
		config.MaxInFlight = cmd.MaxInFlight
	}
	config.MsgTimeout = time.Duration(cmd.TimeoutMs) * time.Millisecond
	return config
}

func (c *client) startProducer(cmd command) {
	producer, err := nsq.NewProducer(cmd.Nsqd, config(cmd))
	if err != nil {
		log.Fatal(err)
	}
	producer.SetLoggerLevel(nsq.LogLevelError)
	if err := producer.Ping(); err != nil {
		log.Fatal(err)
	}
	c.producer = producer
	c.tell(map[string]any{"event": "connected"})
}

func (c *client) publish(cmd command) {
	var err error
	switch cmd.How {
	case "PUB":
		err = c.producer.Publish(cmd.Topic, cmd.Bodies[0])
	case "MPUB":
		err = c.producer.MultiPublish(cmd.Topic, cmd.Bodies)
	default:
		err = c.producer.DeferredPublish(cmd.Topic, time.Duration(cmd.DelayMs)*time.Millisecond, cmd.Bodies[0])
	}
	if err != nil {
		c.tell(map[string]any{"event": "failed", "n": cmd.N, "why": err.Error()})
	} else {
		c.tell(map[string]any{"event": "published", "n": cmd.N})
	}
}

// HandleMessage reports a delivery and answers nothing.
func (c *client) HandleMessage(message *nsq.Message) error {
	message.DisableAutoResponse()
	c.mutex.Lock()
	c.messages = append(c.messages, message)
	number := len(c.messages)
	c.mutex.Unlock()
	c.tell(map[string]any{
		"event": "message", "message": number, "id": string(message.ID[:]), "body": message.Body,
		"attempts": message.Attempts, "timestamp": message.Timestamp,
	})
	return nil
}

func (c *client) startConsumer(cmd command) {
	consumer, err := nsq.NewConsumer(cmd.Topic, cmd.Channel, config(cmd))
	if err != nil {
		log.Fatal(err)
	}
	consumer.SetLoggerLevel(nsq.LogLevelError)
	consumer.AddHandler(c)
	if cmd.Lookupd != "" {
		err = consumer.ConnectToNSQLookupd(cmd.Lookupd)
	} else {
		err = consumer.ConnectToNSQD(cmd.Nsqd)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func (c *client) message(number int) *nsq.Message {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.messages[number-1]
}

func main() {
	c := &client{out: json.NewEncoder(os.Stdout)}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var cmd command
		if err := json.Unmarshal(lines.Bytes(), &cmd); err != nil {
			log.Fatal(err)
		}
		switch cmd.Do {
		case "producer":
			c.startProducer(cmd)
		case "publish":
			go c.publish(cmd)
		case "consumer":
			c.startConsumer(cmd)
		case "fin":
			c.message(cmd.Message).Finish()
		case "req":
			c.message(cmd.Message).RequeueWithoutBackoff(time.Duration(cmd.DelayMs) * time.Millisecond)
		case "touch":
			c.message(cmd.Message).Touch()
		case "close":
			return
		}
	}
}
