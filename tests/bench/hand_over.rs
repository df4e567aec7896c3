//! How long it takes from the release until the next holder knows.

use std::time::Instant;

use rlock_tests::Server;

use crate::numbers::{median, order, quantile, ratio};
use crate::scripts;
use crate::wire::{Wire, load, request};

/// One hand-over, measured in microseconds; the two connections are the holder's and the waiter's.
type HandOver<'a> = Box<dyn FnMut(&mut Wire, &mut Wire) -> f64 + 'a>;

pub(crate) fn measure(server: &Server, quick: bool) {
    let (rounds, times) = if quick { (3, 100) } else { (9, 1000) };
    println!("Hand-over: release sent until the next holder knows, one waiter\n");
    println!(
        "  {:<41} {:>8} {:>8}   p50 against PING",
        "", "p50 us", "p99 us"
    );
    let (mut holder, mut waiter) = (Wire::open(server), Wire::open(server));
    let mut contenders: [(&str, HandOver<'_>); 4] = [
        ("PING round trip", Box::new(ping)),
        ("RLOCK, waiting in the server", Box::new(rlock)),
        ("BLPOP + LPUSH", Box::new(list)),
        ("scripts with a message", scripts_with_messages(server)),
    ];
    let mut p50s = vec![Vec::new(); contenders.len()];
    let mut p99s = p50s.clone();
    for round in 0..rounds {
        for index in order(contenders.len(), round) {
            let hand_over = &mut contenders[index].1;
            let taken: Vec<f64> = (0..times)
                .map(|_| hand_over(&mut holder, &mut waiter))
                .collect();
            p50s[index].push(quantile(&taken, 0.5));
            p99s[index].push(quantile(&taken, 0.99));
        }
    }
    for (index, (name, _)) in contenders.iter().enumerate() {
        let (p50, p99) = (median(&p50s[index]), median(&p99s[index]));
        let against = ratio(&p50s[index], &p50s[0]);
        println!("  {name:<41} {p50:>8.0} {p99:>8.0}   {against}");
    }
    let against = ratio(&p50s[1], &p50s[3]);
    println!("\n  RLOCK's p50 against scripts:  {against}\n");
}

fn us(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e6
}

/// Lets the server run what was sent to it before, on whichever connection.
///
/// The waiter's command lies in the server's socket when PING is sent, so it is run in the same
/// turn of the event loop at the latest, and PING is answered at the end of that turn. To ask INFO
/// on a connection of its own would not do: the server would close that one while we measure.
fn settle(wire: &mut Wire) {
    wire.ask(&["PING"], 1);
}

fn ping(holder: &mut Wire, _: &mut Wire) -> f64 {
    settle(holder);
    let command = request(&["PING"]);
    let begun = Instant::now();
    holder.send(&command);
    holder.lines(1);
    us(begun)
}

fn rlock(holder: &mut Wire, waiter: &mut Wire) -> f64 {
    holder.ask(&["RLOCK.ACQUIRE", "handed", "first", "30000"], 3);
    waiter.send(&request(&[
        "RLOCK.ACQUIRE",
        "handed",
        "second",
        "30000",
        "BLOCK",
        "0",
    ]));
    settle(holder);
    let release = request(&["RLOCK.RELEASE", "handed", "first"]);
    let begun = Instant::now();
    holder.send(&release);
    waiter.expect(["*2", ":1", ":"].into_iter());
    let taken = us(begun);
    holder.expect([":0"].into_iter());
    waiter.ask(&["RLOCK.RELEASE", "handed", "second"], 1);
    taken
}

fn list(holder: &mut Wire, waiter: &mut Wire) -> f64 {
    waiter.send(&request(&["BLPOP", "list", "0"]));
    settle(holder);
    let push = request(&["LPUSH", "list", "x"]);
    let begun = Instant::now();
    holder.send(&push);
    waiter.lines(5);
    let taken = us(begun);
    holder.lines(1);
    taken
}

/// The waiter has tried and has subscribed; the message makes it try again.
fn scripts_with_messages(server: &Server) -> HandOver<'static> {
    let mut messages = Wire::open(server);
    let acquire = load(&mut messages, scripts::ACQUIRE);
    let release = load(&mut messages, scripts::RELEASE);
    messages.ask(&["SUBSCRIBE", "freed"], 6);
    let acquire = move |owner| request(&["EVALSHA", &acquire, "1", "scripted", "30000", owner]);
    let (first, second) = (acquire("first"), acquire("second"));
    let release = request(&[
        "EVALSHA", &release, "3", "scripted", "freed", "latch", "first", "30000", "16000",
    ]);
    Box::new(move |holder, waiter| {
        holder.send(&first);
        holder.expect(["$-1"].into_iter());
        waiter.send(&second);
        waiter.expect([":"].into_iter());
        settle(holder);
        let begun = Instant::now();
        holder.send(&release);
        messages.lines(7);
        waiter.send(&second);
        waiter.expect(["$-1"].into_iter());
        let taken = us(begun);
        holder.expect([":1"].into_iter());
        holder.ask(&["DEL", "latch", "scripted"], 1);
        taken
    })
}
