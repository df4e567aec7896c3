//! A session whose commands go in packets, with any number of holds and waits, and which ends
//! before its process does.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply};

use super::commands::{Use, refusal};
use super::{Life, queued, told};
use crate::random::Random;

/// Thousands of commands of others may come first.
pub(super) const REPLY_WITHIN: Duration = Duration::from_secs(20);

/// So many commands are sent at once.
const PACKET: usize = 250;

pub(super) struct PipelinedSession {
    /// Its own, as a part of the process: it closes when this is dropped.
    pub(super) life: Life,
    grace: u64,
    /// The life of the session; none before the first answer.
    begun_as: Option<i64>,
    /// The server's number of the session's connection.
    pub(super) id: i64,
    events: Conn,
    pub(super) commands: Conn,
    /// By their owners, since an owner waits once: the id of the request, and its use.
    waits: HashMap<String, (String, Use)>,
    /// The holds that it gives back by itself, each with its time.
    holds: Vec<(Instant, Use)>,
}

impl PipelinedSession {
    pub(super) fn begin(life: &Life, grace: u64) -> io::Result<Self> {
        let life = life.session();
        let mut events = Conn::open(life.address)?;
        // The operator knows by this name whose connection it ends.
        events.try_send(&format!("CLIENT SETNAME {}", life.name))?;
        events.try_read(REPLY_WITHIN)?;
        events.try_send("CLIENT ID")?;
        let Reply::Int(id) = events.try_read(REPLY_WITHIN)? else {
            return Err(io::Error::other("no number"));
        };
        let mut session = Self {
            grace,
            begun_as: None,
            id,
            events,
            commands: Conn::open(life.address)?,
            waits: HashMap::new(),
            holds: Vec::new(),
            life,
        };
        session.hear(0, |_| Duration::ZERO)?;
        Ok(session)
    }

    pub(super) fn waits(&self) -> usize {
        self.waits.len()
    }

    pub(super) fn holds(&self) -> usize {
        self.holds.len()
    }

    pub(super) fn waits_as(&self, owner: &str) -> bool {
        self.waits.contains_key(owner)
    }

    /// Takes the locks that are free, and returns them.
    pub(super) fn take(&mut self, uses: Vec<Use>) -> io::Result<Vec<Use>> {
        let rest = format!("SESSION {}", self.life.name);
        let mut taken = Vec::new();
        self.acquire(uses, "none", &rest, |_, the_use| taken.push(the_use))?;
        Ok(taken)
    }

    /// Takes the locks that are free, to release them after that time, and waits for the others.
    pub(super) fn join_queues(
        &mut self,
        uses: Vec<Use>,
        wait_ms: u64,
        mut keeps: impl FnMut(&Use) -> Duration,
    ) -> io::Result<()> {
        let rest = format!("QUEUE {wait_ms} SESSION {}", self.life.name);
        self.acquire(uses, "queue", &rest, |session, the_use| {
            let until = Instant::now() + keeps(&the_use);
            session.keep(until, the_use);
        })
    }

    fn acquire(
        &mut self,
        uses: Vec<Use>,
        how: &str,
        rest: &str,
        mut holds: impl FnMut(&mut Self, Use),
    ) -> io::Result<()> {
        let mut uses = uses.into_iter().peekable();
        while uses.peek().is_some() {
            let packet: Vec<_> = uses.by_ref().take(PACKET).collect();
            let asked = packet.iter().map(|the_use| the_use.acquire(how, rest));
            let (ids, commands): (Vec<_>, Vec<_>) =
                asked.map(|asked| asked.begin(&self.life)).unzip();
            self.commands.try_send_all(&commands)?;
            for (id, the_use) in ids.into_iter().zip(packet) {
                let reply = self.read()?;
                if let Reply::Array(items) = &reply
                    && items.first() == Some(&Reply::Int(-1))
                {
                    queued(&id);
                    self.waits.insert(the_use.owner.clone(), (id, the_use));
                    continue;
                }
                if is_over(&reply) {
                    return Err(io::Error::other("the session is over"));
                }
                told(&id, the_use.acquired(&reply));
                if Use::held(&reply).is_some() {
                    holds(self, the_use);
                }
            }
        }
        Ok(())
    }

    pub(super) fn read(&mut self) -> io::Result<Reply> {
        self.commands.try_read(REPLY_WITHIN)
    }

    /// Of several locks somebody else keeps account.
    pub(super) fn keep(&mut self, until: Instant, the_use: Use) {
        if the_use.is_of_one() {
            self.holds.push((until, the_use));
        }
    }

    /// Gives back the holds whose time has come.
    pub(super) fn release_due(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let (due, rest): (Vec<_>, _) = self.holds.drain(..).partition(|(until, _)| *until <= now);
        self.holds = rest;
        for packet in due.chunks(PACKET) {
            let asked = packet.iter().map(|(_, the_use)| the_use.release());
            let (ids, commands): (Vec<_>, Vec<_>) =
                asked.map(|asked| asked.begin(&self.life)).unzip();
            self.commands.try_send_all(&commands)?;
            for (id, (_, the_use)) in ids.iter().zip(packet) {
                let reply = self.read()?;
                if let Some(what) = the_use.released(&reply) {
                    told(id, what);
                }
            }
        }
        Ok(())
    }

    /// Gives one lock back as often as its owner has it.
    pub(super) fn give_back(&mut self, the_use: &Use) -> io::Result<()> {
        loop {
            let (id, command) = the_use.release().begin(&self.life);
            self.commands.try_send(&command)?;
            let reply = self.read()?;
            if let Some(what) = the_use.released(&reply) {
                told(&id, what);
            }
            if !matches!(reply, Reply::Int(1..)) {
                return Ok(());
            }
        }
    }

    /// Waits so long for events; granted locks it keeps for as long as `keeps` says.
    pub(super) fn hear(
        &mut self,
        wait_ms: u64,
        mut keeps: impl FnMut(&Use) -> Duration,
    ) -> io::Result<()> {
        let block = if wait_ms > 0 {
            format!("BLOCK {wait_ms} ")
        } else {
            String::new()
        };
        let command = format!(
            "RLOCK.EVENTS {} {block}GRACE {}",
            self.life.name, self.grace
        );
        self.events.try_send(&command)?;
        let reply = self.events.try_read(REPLY_WITHIN)?;
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
            let [_seq, kind, _, owner, value, token, _mode, _db] = event.array() else {
                panic!("not an event, but {event:?}");
            };
            let owner = owner.text();
            let kind = kind.text();
            // By this session, on its connection for commands, which is not bound; or the slot of
            // a hold has moved.
            let is_released = kind == "lost" && value.text() == "released";
            if is_released || kind == "error" && token.int() != 0 {
                continue;
            }
            if kind == "lost" {
                // A lost hold need not be given back.
                self.holds.retain(|(_, the_use)| the_use.owner != owner);
                continue;
            }
            let Some((id, the_use)) = self.waits.remove(&owner) else {
                continue;
            };
            match kind.as_str() {
                "granted" => {
                    told(&id, the_use.granted(value.int()));
                    let until = Instant::now() + keeps(&the_use);
                    self.keep(until, the_use);
                }
                "timeout" => told(&id, "refused"),
                "error" => {
                    let code = value.text();
                    told(
                        &id,
                        format!("error {}", code.split(' ').next().unwrap_or("ERR")),
                    );
                }
                other => panic!("an event of the kind {other:?}"),
            }
        }
        Ok(())
    }

    /// Waits there until it is ended.
    pub(super) fn block(&mut self) -> io::Result<()> {
        let command = format!(
            "RLOCK.EVENTS {} BLOCK 0 GRACE {}",
            self.life.name, self.grace
        );
        self.events.try_send(&command)
    }
}

impl Drop for PipelinedSession {
    /// Before the connections are closed: its holds may end from now on.
    fn drop(&mut self) {
        self.life.closes();
    }
}

fn is_over(reply: &Reply) -> bool {
    refusal(reply).is_some_and(|error| error.contains("NOSESSION"))
}

/// Up to this number of milliseconds.
pub(super) fn up_to(random: &mut Random, ms: u64) -> Duration {
    Duration::from_micros(random.within(0, ms * 1000))
}
