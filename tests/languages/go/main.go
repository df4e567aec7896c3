// Writes its input, line by line, to a store that one process at a time may write to.
package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/redis/go-redis/v9"
)

// The store's part: it takes no write with a smaller token than the largest it has seen.
var write = redis.NewScript(`
	if tonumber(redis.call('HGET', KEYS[1], 'token') or 0) > tonumber(ARGV[1]) then return 0 end
	redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
	return 1`)

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
	waiting, stop := signal.NotifyContext(ctx, os.Interrupt) // Ctrl-C leaves the queue
	lock, err := acquire(waiting, redis.NewClient(options), "stock:42")
	stop()
	if err != nil {
		return err
	}
	fmt.Println("held, token", lock.token)
	return errors.Join(work(ctx, lock), lock.release(ctx))
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("released")
}
