//! Connections that take locks and wait for them in the server, enter again, renew, stay too long,
//! and give back.

use std::io;
use std::thread;
use std::time::Duration;

use rlock_tests::{Conn, Reply};

use super::commands::{Use, refusal};
use super::{Life, told};
use crate::random::Random;

pub(super) fn run(life: &Life, mut random: Random) {
    while life.goes_on() {
        // On a broken connection the reply is unknown, so this owner is not used again.
        let broken = Conn::open(life.address).and_then(|mut conn| {
            while life.goes_on() {
                once(life, &mut random, &mut conn)?;
                pause(&mut random, 10);
            }
            Ok(())
        });
        if broken.is_err() {
            pause(&mut random, 30);
        }
    }
}

fn once(life: &Life, random: &mut Random, conn: &mut Conn) -> io::Result<()> {
    let mut the_use = Use::new(life, random, "free");
    let waits = random.percent(80);
    let wait = if waits { random.within(20, 1500) } else { 0 };
    let (how, rest) = if waits {
        ("block", format!("BLOCK {wait}"))
    } else {
        ("none", String::new())
    };
    let wait = Duration::from_millis(wait);
    let Some(token) = acquire(life, conn, &the_use, how, &rest, wait)? else {
        return Ok(());
    };
    the_use.token = (the_use.has_a_token() && random.percent(30)).then_some(token);
    let mut count = 1;
    if the_use.is_of_one() && random.percent(25) {
        // Of permits an owner has one hold.
        let once = if the_use.is_of_permits() { "ONCE" } else { "" };
        let again = acquire(life, conn, &the_use, "none", once, Duration::ZERO)?;
        count += usize::from(again.is_some() && once.is_empty());
        // Another one, if the first hold was over by then.
        the_use.token = the_use.token.and(again).or(the_use.token);
    }
    // A writer that reads as well, and gives the writing back first, becomes a reader.
    let mut reading = the_use.reading().filter(|_| random.percent(30));
    if let Some(read) = &reading {
        let held = acquire(life, conn, read, "none", "", Duration::ZERO)?;
        reading = reading.filter(|_| held.is_some());
    }
    if random.percent(4) {
        thread::sleep(the_use.lease() + Duration::from_millis(random.within(0, 100)));
    } else {
        pause(random, 20);
    }
    if random.percent(20) {
        let (id, reply) = the_use.renew().send(life, conn, Duration::ZERO)?;
        match reply {
            Reply::Int(renewed) => told(&id, format!("renewed {renewed}")),
            other => told_if_known(&id, refusal(&other)),
        }
    }
    for the_use in std::iter::repeat_n(&the_use, count).chain(&reading) {
        let (id, reply) = the_use.release().send(life, conn, Duration::ZERO)?;
        told_if_known(&id, the_use.released(&reply));
    }
    Ok(())
}

/// The token, if it is held now.
fn acquire(
    life: &Life,
    conn: &mut Conn,
    the_use: &Use,
    how: &str,
    rest: &str,
    wait: Duration,
) -> io::Result<Option<u64>> {
    let (id, reply) = the_use.acquire(how, rest).send(life, conn, wait)?;
    if let Some((count, token)) = Use::held(&reply) {
        told(&id, format!("held {count} {token}"));
        return Ok(Some(u64::try_from(token).expect("a token")));
    }
    match refusal(&reply) {
        Some(error) => {
            told(&id, error);
            // A server that has just said no says no again.
            thread::sleep(Duration::from_millis(10));
        }
        None => told(&id, "refused"),
    }
    Ok(None)
}

fn told_if_known(id: &str, what: Option<String>) {
    if let Some(what) = what {
        told(id, what);
    }
}

/// So that there is an idle moment now and then.
fn pause(random: &mut Random, up_to_ms: u64) {
    thread::sleep(Duration::from_micros(random.within(0, up_to_ms * 1000)));
}
