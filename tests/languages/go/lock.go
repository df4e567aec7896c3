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
	lock := &Lock{db: db, name: name}
	lock.owner = fmt.Sprintf("%s:%d", process, number.Add(1)) // another one each time
	returns := make(chan struct{})
	defer close(returns)
	go lock.cancel(ctx, returns)
	// A wait has a connection of the pool to itself; its timeout is longer than that of the server.
	// go-redis sends a command again if the reply is lost: with ONCE that does not count twice.
	reply, err := db.WithTimeout(wait+5*time.Second).Do(ctx, "RLOCK.ACQUIRE", name, lock.owner,
		lease.Milliseconds(), "BLOCK", wait.Milliseconds(), "ONCE").Int64Slice()
	if ctx.Err() != nil { // the lock may have been granted all the same, also if no reply came
		err = db.Do(context.WithoutCancel(ctx), "RLOCK.RELEASE", name, lock.owner).Err()
		return nil, errors.Join(ctx.Err(), unlessNil(err))
	}
	if err != nil {
		return nil, err
	}
	if reply[0] == 0 {
		return nil, fmt.Errorf("%s is busy, its lease has %d ms left", name, reply[1])
	}
	lock.token = reply[1]
	return lock, nil
}

// Leaves the queue when the context ends: go-redis goes on reading until the server answers. More
// than once, since the first may reach the server before the wait does.
func (l *Lock) cancel(ctx context.Context, returns <-chan struct{}) {
	select {
	case <-returns:
		return
	case <-ctx.Done():
	}
	for {
		l.db.Do(context.WithoutCancel(ctx), "RLOCK.CANCEL", l.name, l.owner)
		select {
		case <-returns:
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Whether the lock is still ours, and from now on for a whole lease.
func (l *Lock) renew(ctx context.Context) (bool, error) {
	return l.db.Do(ctx, "RLOCK.RENEW", l.name, l.owner, lease.Milliseconds(), "TOKEN", l.token).Bool()
}

// Gives the lock back, also if the context has ended. Null: it was lost meanwhile, or an earlier
// attempt has released it.
func (l *Lock) release(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	return unlessNil(l.db.Do(ctx, "RLOCK.RELEASE", l.name, l.owner, "TOKEN", l.token).Err())
}

func unlessNil(err error) error {
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}
