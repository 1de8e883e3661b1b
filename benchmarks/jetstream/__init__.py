"""NATS JetStream beside our broker: another protocol, so another client (`client/main.go`), and rows that both know."""
