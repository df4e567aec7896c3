//! A session: many waits on one connection, grants and losses fetched on another.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply};

use super::commands::{Use, refusal};
use super::{Life, queued, told, wanted};
use crate::random::Random;

/// How many waits a session has at most.
const WAITS: usize = 6;

pub(super) fn run(life: &Life, mut random: Random) {
    while life.goes_on() {
        let broken = Session::begin(life, &mut random).and_then(|mut session| {
            let result = session.go_on(&mut random);
            // Before the connections are closed: its holds may end from now on.
            life.closes();
            result
        });
        if broken.is_err() {
            thread::sleep(Duration::from_millis(random.within(0, 30)));
        }
    }
}

struct Session<'a> {
    life: &'a Life,
    name: String,
    grace: u64,
    /// The life of the session; none before the first answer.
    begun_as: Option<i64>,
    listening: Conn,
    commands: Conn,
    waits: Vec<(String, Use)>,
    holds: Vec<(Instant, Use)>,
}

impl<'a> Session<'a> {
    fn begin(life: &'a Life, random: &mut Random) -> io::Result<Self> {
        let mut session = Self {
            life,
            name: life.owner(),
            grace: *random.pick(&[0, 300]),
            begun_as: None,
            listening: Conn::open(life.address)?,
            commands: Conn::open(life.address)?,
            waits: Vec::new(),
            holds: Vec::new(),
        };
        session.hear(random, 0)?;
        Ok(session)
    }

    fn go_on(&mut self, random: &mut Random) -> io::Result<()> {
        while self.life.goes_on() {
            while self.waits.len() + self.holds.len() < WAITS {
                self.queue(random)?;
            }
            self.hear(random, 15)?;
            let now = Instant::now();
            let (due, rest) = self.holds.drain(..).partition(|(until, _)| *until <= now);
            self.holds = rest;
            let due: Vec<_> = due;
            for (_, the_use) in due {
                self.release(&the_use)?;
            }
        }
        Ok(())
    }

    fn queue(&mut self, random: &mut Random) -> io::Result<()> {
        let the_use = Use::new(self.life, random, "session");
        let wait = random.within(50, 2000);
        let asks = random.pick(&["WANTED", ""]);
        let rest = format!("QUEUE {wait} SESSION {} {asks}", self.name);
        let acquire = the_use.acquire("queue", &rest);
        let (id, reply) = acquire.send(self.life, &mut self.commands, Duration::ZERO)?;
        if let Some((count, token)) = Use::held(&reply) {
            told(&id, format!("held {count} {token}"));
            self.keep(random, the_use);
        } else if let Some(error) = refusal(&reply) {
            told(&id, &error);
            if error.contains("NOSESSION") {
                return Err(io::Error::other("the session is over"));
            }
            // A server that has just said no says no again.
            thread::sleep(Duration::from_millis(10));
        } else {
            queued(&id);
            self.waits.push((id, the_use));
        }
        Ok(())
    }

    fn keep(&mut self, random: &mut Random, the_use: Use) {
        let until = Instant::now() + Duration::from_millis(random.within(0, 25));
        self.holds.push((until, the_use));
    }

    fn release(&mut self, the_use: &Use) -> io::Result<()> {
        let release = the_use.release();
        let (id, reply) = release.send(self.life, &mut self.commands, Duration::ZERO)?;
        if let Some(what) = the_use.released(&reply) {
            told(&id, what);
        }
        Ok(())
    }

    /// Waits so long for events.
    fn hear(&mut self, random: &mut Random, wait: u64) -> io::Result<()> {
        let block = if wait > 0 {
            format!("BLOCK {wait} ")
        } else {
            String::new()
        };
        let events = format!("RLOCK.EVENTS {} {block}GRACE {}", self.name, self.grace);
        self.listening.try_send(&events)?;
        let reply = self
            .listening
            .try_read(Duration::from_millis(wait + 1500))?;
        if let Reply::Error(text) = &reply {
            return Err(io::Error::other(String::from_utf8_lossy(text).into_owned()));
        }
        let [life, events] = reply.array() else {
            panic!("not what EVENTS answers, but {reply:?}");
        };
        if *self.begun_as.get_or_insert(life.int()) != life.int() {
            return Err(io::Error::other("the session has begun anew"));
        }
        for event in events.array() {
            let [_seq, kind, lock, owner, value, token, _mode, _db] = event.array() else {
                panic!("not an event, but {event:?}");
            };
            let owner = owner.text();
            match kind.text().as_str() {
                "granted" => {
                    let the_use = self.end_wait(&owner, |the_use| {
                        format!("held {} {}", the_use.count(), value.int())
                    });
                    if let Some(the_use) = the_use {
                        self.keep(random, the_use);
                    }
                }
                "timeout" => drop(self.end_wait(&owner, |_| "refused".to_owned())),
                // The slot of a hold has moved.
                "error" if token.int() != 0 => {}
                "error" => {
                    let code = value.text();
                    let code = code.split(' ').next().unwrap_or("ERR");
                    drop(self.end_wait(&owner, |_| format!("error {code}")));
                }
                // By this session, on its connection for commands, which is not bound.
                "lost" if value.text() == "released" => {}
                // A lost hold need not be given back.
                "lost" => self.holds.retain(|(_, the_use)| the_use.owner != owner),
                "wanted" => wanted(&lock.text(), &owner),
                other => panic!("an event of the kind {other:?}"),
            }
        }
        Ok(())
    }

    fn end_wait(&mut self, owner: &str, what: impl Fn(&Use) -> String) -> Option<Use> {
        let at = self
            .waits
            .iter()
            .position(|(_, the_use)| the_use.owner == owner)?;
        let (id, the_use) = self.waits.remove(at);
        told(&id, what(&the_use));
        Some(the_use)
    }
}
