// Writes its input, line by line, to a store that one process at a time may write to.
package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const lease, wait = 30 * time.Second, 10 * time.Second

var (
	client = rand.Text()
	number atomic.Int64
)

// The store's part: it takes no write with a smaller token than the largest it has seen.
var write = redis.NewScript(`
	if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
	redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
	return 1`)

type Lock struct {
	db          *redis.Client
	name, owner string
	token       int64
}

func acquire(ctx context.Context, db *redis.Client, name string) (*Lock, error) {
	owner := fmt.Sprintf("%s:%d", client, number.Add(1)) // another one each time
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

func work(ctx context.Context, lock *Lock) error {
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); fmt.Println("written") {
		if ours, err := lock.renew(ctx); err != nil {
			return err
		} else if !ours {
			return errors.New("lost: stock:42 is not ours any more")
		}
		taken, err := write.Run(ctx, lock.db, []string{"store:42"}, lock.token, lines.Text()).Bool()
		if err != nil {
			return err
		} else if !taken {
			return errors.New("refused: the store has seen a larger token")
		}
	}
	return nil
}

func run(ctx context.Context) error {
	options, err := redis.ParseURL(cmp.Or(os.Getenv("REDIS_URL"), "redis://127.0.0.1:6379"))
	if err != nil {
		return err
	}
	lock, err := acquire(ctx, redis.NewClient(options), "stock:42")
	if err != nil {
		return err
	}
	fmt.Println("held, token", lock.token)
	if err := errors.Join(work(ctx, lock), lock.release(ctx)); err != nil {
		return err
	}
	fmt.Println("released")
	return nil
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
