package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const lease, wait = 30 * time.Second, 10 * time.Second

var (
	process = rand.Text()
	number  atomic.Int64
)

// Lock is a lock of RLOCK that we hold.
type Lock struct {
	db          *redis.Client
	name, owner string
	token       int64
}

func acquire(ctx context.Context, db *redis.Client, name string) (*Lock, error) {
	owner := fmt.Sprintf("%s:%d", process, number.Add(1)) // another one each time
	// A wait has a connection of the pool to itself; its timeout is longer than that of the server.
	// go-redis sends a command again if the reply is lost: with ONCE that does not count twice.
	reply, err := db.WithTimeout(wait+5*time.Second).Do(ctx, "RLOCK.ACQUIRE", name, owner,
		lease.Milliseconds(), "BLOCK", wait.Milliseconds(), "ONCE").Int64Slice()
	if err != nil {
		return nil, err
	}
	if reply[0] == 0 {
		return nil, fmt.Errorf("%s is busy, its lease has %d ms left", name, reply[1])
	}
	return &Lock{db, name, owner, reply[1]}, nil
}

// Whether the lock is still ours, and from now on for a whole lease.
func (l *Lock) renew(ctx context.Context) (bool, error) {
	return l.db.Do(ctx, "RLOCK.RENEW", l.name, l.owner, lease.Milliseconds(), "TOKEN", l.token).Bool()
}

func (l *Lock) release(ctx context.Context) error {
	err := l.db.Do(ctx, "RLOCK.RELEASE", l.name, l.owner, "TOKEN", l.token).Err()
	if errors.Is(err, redis.Nil) {
		return nil // it was lost meanwhile, or an earlier attempt has released it
	}
	return err
}
