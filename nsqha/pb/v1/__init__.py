"""Generated from proto/nsqha/v1 by `make proto`; do not edit."""
