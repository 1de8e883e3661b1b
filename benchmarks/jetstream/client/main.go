// The load of the rows that JetStream is compared in. It says "begin" when its window begins and
// "end <messages>" when it ends: whoever started it reads the servers' CPU at these two lines. Publishers that wait
// for each ack also say "median <microseconds>".
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	subject = "bench"
	stream  = "BENCH"
	warmup  = 500 * time.Millisecond
)

// How long a publish may wait for room in its window.
var patience = nats.StallWait(30 * time.Second)

var (
	addresses   = flag.String("addresses", "", "of all servers, with commas between them")
	work        = flag.String("work", "pipelined", "pipelined, waiting or consume")
	connections = flag.Int("connections", 4, "")
	outstanding = flag.Int("outstanding", 200, "unanswered publishes of a connection, or messages of a consumer")
	size        = flag.Int("size", 100, "bytes of a body")
	replicas    = flag.Int("replicas", 1, "of the stream")
	seconds     = flag.Float64("seconds", 2, "of the window")
	backlog     = flag.Int("backlog", 200000, "messages to consume")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	first, js := connect()
	create(js)
	switch *work {
	case "pipelined":
		publish(pipelined)
	case "waiting":
		publish(waiting)
	case "consume":
		consume(js)
	default:
		log.Fatalf("there is no work %q", *work)
	}
	first.Close()
}

func connect() (*nats.Conn, nats.JetStreamContext) {
	connection, err := nats.Connect(*addresses, nats.DontRandomize())
	check(err)
	js, err := connection.JetStream(nats.PublishAsyncMaxPending(*outstanding))
	check(err)
	return connection, js
}

// A cluster has its own leader to elect before it creates anything.
func create(js nats.JetStreamContext) {
	config := &nats.StreamConfig{
		Name: stream, Subjects: []string{subject}, Storage: nats.FileStorage, Replicas: *replicas,
	}
	var err error
	for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(200 * time.Millisecond) {
		if _, err = js.AddStream(config); err == nil {
			return
		}
	}
	check(err)
}

type publisher func(js nats.JetStreamContext, body []byte, goOn func() bool, acked func(time.Duration))

func pipelined(js nats.JetStreamContext, body []byte, goOn func() bool, acked func(time.Duration)) {
	for goOn() {
		_, err := js.PublishAsync(subject, body, patience)
		check(err)
		acked(0)
	}
	<-js.PublishAsyncComplete()
}

func waiting(js nats.JetStreamContext, body []byte, goOn func() bool, acked func(time.Duration)) {
	for goOn() {
		begun := time.Now()
		_, err := js.Publish(subject, body)
		check(err)
		acked(time.Since(begun))
	}
}

func publish(one publisher) {
	var count atomic.Int64
	var stop atomic.Bool
	var all sync.WaitGroup
	took := make([][]time.Duration, *connections)
	body := make([]byte, *size)
	for i := range took {
		connection, js := connect()
		all.Add(1)
		go func() {
			defer all.Done()
			defer connection.Close()
			one(js, body, func() bool { return !stop.Load() }, func(d time.Duration) {
				count.Add(1)
				if d > 0 {
					took[i] = append(took[i], d)
				}
			})
		}()
	}
	time.Sleep(warmup)
	fmt.Println("begin")
	before := count.Load()
	time.Sleep(time.Duration(*seconds * float64(time.Second)))
	measured := count.Load() - before
	fmt.Printf("end %d\n", measured)
	stop.Store(true)
	all.Wait()
	fmt.Printf("median %d\n", median(took).Microseconds())
}

func median(took [][]time.Duration) time.Duration {
	var all []time.Duration
	for _, some := range took {
		all = append(all, some...)
	}
	if len(all) == 0 {
		return 0
	}
	sort.Slice(all, func(i, j int) bool { return all[i] < all[j] })
	return all[len(all)/2]
}

func consume(js nats.JetStreamContext) {
	connection, filler := connect()
	body := make([]byte, *size)
	for range *backlog {
		_, err := filler.PublishAsync(subject, body, patience)
		check(err)
	}
	<-filler.PublishAsyncComplete()
	connection.Close()
	time.Sleep(warmup)
	var count atomic.Int64
	done := make(chan struct{})
	fmt.Println("begin")
	for range *connections {
		connection, js := connect()
		defer connection.Close()
		_, err := js.QueueSubscribe(subject, "group", func(message *nats.Msg) {
			if err := message.Ack(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
				log.Fatal(err)
			}
			if count.Add(1) == int64(*backlog) {
				close(done)
			}
		}, nats.ManualAck(), nats.Durable("durable"), nats.MaxAckPending(*connections**outstanding))
		check(err)
	}
	<-done
	fmt.Printf("end %d\n", count.Load())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
