//! How long it takes from the release until the next holder knows.

use std::time::Instant;

use rlock_tests::{Server, until};

use crate::numbers::quantile;
use crate::scripts;
use crate::wire::{Wire, load};

pub(crate) fn measure(server: &Server, quick: bool) {
    let times = if quick { 200 } else { 3000 };
    println!("Hand-over: release sent until the next holder knows, one waiter\n");
    println!(
        "  {:<41} {:>8} {:>8}   against PING",
        "", "p50 us", "p99 us"
    );
    let mut holder = Wire::open(server);
    let mut waiter = Wire::open(server);
    // The two of a pair take turns, so that each contender's rounds lie among all others'.
    let mut results = vec![Vec::new(); 4];
    for _ in 0..times / 100 {
        results[0].extend((0..100).map(|_| ping(&mut holder)));
        results[1].extend(rlock(server, &mut holder, &mut waiter));
        results[2].extend(list(server, &mut holder, &mut waiter));
        results[3].extend(scripts_with_messages(server));
    }
    let names = [
        "PING round trip",
        "RLOCK, waiting in the server",
        "BLPOP + LPUSH",
        "scripts with a message",
    ];
    let base = quantile(&results[0], 0.5);
    for (name, times) in names.iter().zip(&results) {
        let (p50, p99) = (quantile(times, 0.5), quantile(times, 0.99));
        println!("  {name:<41} {p50:>8.0} {p99:>8.0}   {:.2}", p50 / base);
    }
    println!();
}

fn us(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e6
}

fn ping(wire: &mut Wire) -> f64 {
    let begun = Instant::now();
    wire.ask(&["PING"], 1);
    us(begun)
}

fn rlock(server: &Server, a: &mut Wire, b: &mut Wire) -> Vec<f64> {
    a.ask(&["RLOCK.ACQUIRE", "handed", "first", "30000"], 3);
    let mut owners = ["first", "second"];
    let mut wires = [a, b];
    let times = (0..100).map(|_| {
        let [holder, waiter] = &mut wires;
        waiter.send(&crate::wire::request(&[
            "RLOCK.ACQUIRE",
            "handed",
            owners[1],
            "30000",
            "BLOCK",
            "0",
        ]));
        until("the waiter is in line", || {
            server.info_number("rlock_waiters") == 1
        });
        let begun = Instant::now();
        holder.send(&crate::wire::request(&[
            "RLOCK.RELEASE",
            "handed",
            owners[0],
        ]));
        waiter.lines(3);
        let taken = us(begun);
        holder.lines(1);
        owners.swap(0, 1);
        wires.swap(0, 1);
        taken
    });
    let times = times.collect();
    wires[0].ask(&["RLOCK.RELEASE", "handed", owners[0]], 1);
    times
}

fn list(server: &Server, a: &mut Wire, b: &mut Wire) -> Vec<f64> {
    let times = (0..100).map(|_| {
        b.send(&crate::wire::request(&["BLPOP", "list", "0"]));
        until("the list is waited for", || {
            server.info_number("blocked_clients") == 1
        });
        let begun = Instant::now();
        a.send(&crate::wire::request(&["LPUSH", "list", "x"]));
        b.lines(5);
        let taken = us(begun);
        a.lines(1);
        taken
    });
    times.collect()
}

/// The waiter has subscribed; the message makes it try again.
fn scripts_with_messages(server: &Server) -> Vec<f64> {
    let (mut holder, mut waiter) = (Wire::open(server), Wire::open(server));
    let mut messages = Wire::open(server);
    let acquire = load(&mut holder, scripts::ACQUIRE);
    let release = load(&mut holder, scripts::RELEASE);
    messages.ask(&["SUBSCRIBE", "freed"], 6);
    let acquire = |owner| ["EVALSHA", &acquire, "1", "scripted", "30000", owner];
    let release = |owner| {
        [
            "EVALSHA", &release, "3", "scripted", "freed", "latch", owner, "30000", "16000",
        ]
    };
    let mut times = Vec::new();
    for _ in 0..100 {
        holder.ask(&acquire("first"), 1);
        waiter.ask(&acquire("second"), 1);
        let begun = Instant::now();
        holder.send(&crate::wire::request(&release("first")));
        messages.lines(7);
        waiter.ask(&acquire("second"), 1);
        times.push(us(begun));
        holder.lines(1);
        holder.ask(&["DEL", "latch", "scripted"], 1);
    }
    times
}
