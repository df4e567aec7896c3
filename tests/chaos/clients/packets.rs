//! Endings in one moment: sessions are ended in the same packet, and so in the same turn of the
//! server's event loop, in which the locks that they held are asked for.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rlock_tests::{Conn, Reply};

use super::Life;
use super::commands::{Locks, Use, refusal};
use super::pipelined::{PipelinedSession, REPLY_WITHIN, up_to};
use super::told;
use crate::history::now;
use crate::random::Random;

/// Locks that are taken several at once, and read-write locks.
pub(crate) const LOCKS_IN_PACKETS: Locks = &[
    "t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9", "t10", "t11", "t12", "t13", "t14",
    "t15", "t16", "t17", "t18", "t19", "t20", "t21", "t22", "t23", "w0", "w1", "w2", "w3", "w4",
    "w5", "w6", "w7",
];

const PLAIN: usize = 24;

/// A wait does not outlive the next few packets of others.
const WAIT_MS: std::ops::Range<u64> = 50..400;

pub(super) fn run(life: &Life, mut random: Random) {
    while life.goes_on() {
        let broken = PipelinedSession::begin(life, 0).and_then(|mut survivor| {
            while life.goes_on() {
                if random.percent(35) {
                    writer_who_reads(life, &mut random, &mut survivor)?;
                } else {
                    several(life, &mut random, &mut survivor)?;
                }
            }
            Ok(())
        });
        if broken.is_err() {
            thread::sleep(up_to(&mut random, 30));
        }
    }
}

/// A writer whose reading belongs to another session; both end, and writers wait.
fn writer_who_reads(
    life: &Life,
    random: &mut Random,
    survivor: &mut PipelinedSession,
) -> io::Result<()> {
    let lock = *random.pick(&LOCKS_IN_PACKETS[PLAIN..]);
    let mut dying = [begin(life, random)?, begin(life, random)?];
    let write = Use::of(life.owner(), &[lock], "WRITE");
    let written = dying[0].take(vec![write])?;
    let reads: Vec<_> = written.iter().filter_map(Use::reading).collect();
    if reads.is_empty() {
        // Somebody else has it.
        return Ok(());
    }
    dying[1].take(reads)?;
    let any = |random: &mut Random| {
        let mode = *random.pick(&["WRITE", "WRITE", "READ"]);
        Use::of(life.owner(), &[lock], mode)
    };
    if random.percent(30) {
        // First in the queue is one who leaves it in the same moment.
        let of = index(random, dying.len());
        dying[of].join_queues(vec![any(random)], 0, |_| Duration::ZERO)?;
    }
    let waits: Vec<_> = (0..random.within(2, 5)).map(|_| any(random)).collect();
    let owners: Vec<_> = waits.iter().map(|the_use| the_use.owner.clone()).collect();
    join_queues(random, survivor, waits)?;
    let mut packet = Packet::of_kills(kills(random, &dying));
    for _ in 0..random.within(0, 3) {
        match random.within(0, 8) {
            0..4 => packet.add("SWAPDB 0 0".to_owned()),
            4..7 => packet.add_newcomer(&survivor.life, any(random)),
            _ => packet.add_break(random, &survivor.life, lock),
        }
    }
    packet.send(random, survivor)?;
    await_all(random, survivor, &owners)
}

/// An owner holds some locks and waits for those and others, which sessions hold that end; others
/// wait behind it; and in the same packet it asks for something else.
fn several(life: &Life, random: &mut Random, survivor: &mut PipelinedSession) -> io::Result<()> {
    let mut locks = LOCKS_IN_PACKETS[..PLAIN].to_vec();
    let mut some = |count: u64| -> Vec<_> {
        let pick = |_| locks.swap_remove(index(random, locks.len()));
        (0..count).map(pick).collect()
    };
    let (held, wanted) = (some(1), some(1));
    let (held, wanted) = match random.within(0, 3) {
        0 => ([held, some_more(random, &mut locks)].concat(), wanted),
        1 => (held, [wanted, some_more(random, &mut locks)].concat()),
        _ => (held, wanted),
    };
    let owner = life.owner();
    let alone = |lock: &&'static str| Use::of(owner.clone(), &[*lock], "");
    let mine: Vec<_> = held.iter().map(alone).collect();
    let mut dying = vec![begin(life, random)?];
    if random.percent(40) {
        dying.push(begin(life, random)?);
    }
    let mut has_all = survivor.take(mine.clone())?.len() == mine.len();
    for lock in &wanted {
        let of = index(random, dying.len());
        let other = Use::of(life.owner(), &[lock], "");
        has_all &= dying[of].take(vec![other])?.len() == 1;
    }
    let all = [held, wanted.clone()].concat();
    let together = Use::of(owner.clone(), &all, "");
    if has_all {
        if random.percent(30) {
            // First in some queues is one who leaves them in the same moment.
            let of = index(random, dying.len());
            let some = &all[index(random, all.len())..];
            let before = Use::of(life.owner(), some, "");
            dying[of].join_queues(vec![before], 0, |_| Duration::ZERO)?;
        }
        join_queues(random, survivor, vec![together.clone()])?;
        let blocked = if random.percent(30) {
            let lock = all[index(random, all.len())];
            Some(Blocked::begin(life, survivor, lock)?)
        } else {
            None
        };
        let behind = all.iter().chain(&all).filter(|_| random.percent(70));
        let behind = behind.map(|lock| Use::of(life.owner(), &[lock], ""));
        let behind: Vec<_> = behind.collect();
        join_queues(random, survivor, behind)?;
        let mut packet = Packet::of_kills(kills(random, &dying));
        if let Some(blocked) = blocked.iter().find(|_| random.percent(50)) {
            packet.add(format!("CLIENT KILL ID {}", blocked.client));
        }
        for _ in 0..random.within(1, 4) {
            let newcomer = Use::of(life.owner(), &[wanted[index(random, wanted.len())]], "");
            packet.add_any(random, &survivor.life, &together, newcomer);
        }
        packet.send(random, survivor)?;
        await_end(random, survivor, &together)?;
        if let Some(blocked) = blocked {
            blocked.end(survivor)?;
        }
    }
    for lock in &all {
        survivor.give_back(&alone(lock))?;
    }
    Ok(())
}

fn some_more(random: &mut Random, from: &mut Vec<&'static str>) -> Vec<&'static str> {
    vec![from.swap_remove(index(random, from.len()))]
}

fn index(random: &mut Random, of: usize) -> usize {
    usize::try_from(random.within(0, of as u64)).expect("an index")
}

fn begin(life: &Life, random: &mut Random) -> io::Result<PipelinedSession> {
    PipelinedSession::begin(life, *random.pick(&[0, 0, 0, 20]))
}

fn join_queues(
    random: &mut Random,
    survivor: &mut PipelinedSession,
    uses: Vec<Use>,
) -> io::Result<()> {
    let wait = random.within(WAIT_MS.start, WAIT_MS.end);
    survivor.join_queues(uses, wait, |_| up_to(random, 10))
}

/// In any order. They are over from now on.
fn kills(random: &mut Random, dying: &[PipelinedSession]) -> Vec<String> {
    let mut left: Vec<_> = dying.iter().collect();
    let mut kills = Vec::new();
    while !left.is_empty() {
        let session = left.swap_remove(index(random, left.len()));
        session.life.closes();
        kills.push(format!("CLIENT KILL ID {}", session.id));
    }
    kills
}

/// Another command of the packet, and the meaning of its answer.
enum Answer {
    Nothing,
    Acquired(Use),
    Released,
    Renewed,
    Broken,
}

struct Packet {
    /// By which to tell the answer; the command; what the answer means.
    commands: Vec<(String, String, Answer)>,
}

impl Packet {
    fn of_kills(kills: Vec<String>) -> Self {
        let mut packet = Self {
            commands: Vec::new(),
        };
        for kill in kills {
            packet.add(kill);
        }
        packet
    }

    /// Something whose answer says nothing of a lock.
    fn add(&mut self, command: String) {
        self.commands
            .push((String::new(), command, Answer::Nothing));
    }

    /// A caller that asks for a lock and does not wait.
    fn add_newcomer(&mut self, life: &Life, the_use: Use) {
        let rest = format!("SESSION {}", life.name);
        let (id, command) = the_use.acquire("none", &rest).begin(life);
        self.commands.push((id, command, Answer::Acquired(the_use)));
    }

    /// The end of whatever holds of it there are.
    fn add_break(&mut self, random: &mut Random, life: &Life, lock: &str) {
        // A deleted read-write lock leaves its readers' other keys behind.
        let is_plain = LOCKS_IN_PACKETS[..PLAIN].contains(&lock);
        let ends = if is_plain && random.percent(50) {
            "DEL"
        } else {
            "RLOCK.BREAK"
        };
        let command = format!("{ends} {lock}");
        self.commands
            .push((life.breaks(lock), command, Answer::Broken));
    }

    /// A command about an owner's holds and waits, or about others' holds of the same lock.
    fn add_any(&mut self, random: &mut Random, life: &Life, together: &Use, newcomer: Use) {
        let lock = newcomer.locks[0];
        let (asked, answer) = match random.within(0, 12) {
            0..3 => (together.release(), Answer::Released),
            3..5 => return self.add_newcomer(life, together.clone()),
            5..7 => (together.renew(), Answer::Renewed),
            7 => return self.add_newcomer(life, newcomer),
            8 | 9 => return self.add_break(random, life, lock),
            10 => return self.add(format!("RLOCK.CANCEL {lock} {}", together.owner)),
            _ => return self.add("SWAPDB 0 0".to_owned()),
        };
        let (id, command) = asked.begin(life);
        self.commands.push((id, command, answer));
    }

    /// Sends all in one write, in a transaction or not, and writes the replies down.
    fn send(self, random: &mut Random, survivor: &mut PipelinedSession) -> io::Result<()> {
        let mut commands: Vec<_> = self
            .commands
            .iter()
            .map(|(_, command, _)| command.clone())
            .collect();
        let in_transaction = random.percent(25);
        if in_transaction {
            commands.insert(0, "MULTI".to_owned());
            commands.push("EXEC".to_owned());
        }
        survivor.commands.try_send_all(&commands)?;
        let replies: io::Result<Vec<_>> = commands.iter().map(|_| survivor.read()).collect();
        let mut replies = replies?;
        if in_transaction {
            replies = match replies.pop() {
                Some(Reply::Array(replies)) => replies,
                // Nothing was done.
                _ => return Ok(()),
            };
        }
        for ((id, _, answer), reply) in self.commands.into_iter().zip(&replies) {
            let id = id.as_str();
            match (answer, reply) {
                (Answer::Nothing, _) => {}
                (Answer::Broken, _) => println!("| broke {id} {}", now()),
                (Answer::Acquired(the_use), _) => {
                    told(id, the_use.acquired(reply));
                    if Use::held(reply).is_some() {
                        survivor.keep(Instant::now() + up_to(random, 10), the_use);
                    }
                }
                (Answer::Released, Reply::Int(count @ 1..)) => told(id, format!("gave {count}")),
                (Answer::Released, Reply::Int(0)) => told(id, "lost"),
                (Answer::Renewed, Reply::Int(count)) => told(id, format!("renewed {count}")),
                _ => {
                    if let Some(error) = refusal(reply) {
                        told(id, error);
                    }
                }
            }
        }
        Ok(())
    }
}

/// One that waits in the server on a connection of its own, for the session's sake.
struct Blocked {
    conn: Conn,
    client: i64,
    id: String,
    the_use: Use,
}

impl Blocked {
    fn begin(life: &Life, survivor: &PipelinedSession, lock: &'static str) -> io::Result<Self> {
        let mut conn = Conn::open(life.address)?;
        conn.try_send("CLIENT ID")?;
        let Reply::Int(client) = conn.try_read(REPLY_WITHIN)? else {
            return Err(io::Error::other("no number"));
        };
        // A grant that it is never told of ends soon.
        let the_use = Use::of(life.owner(), &[lock], "").for_ms(300);
        let rest = format!("BLOCK 300 SESSION {}", survivor.life.name);
        let (id, command) = the_use.acquire("block", &rest).begin(&survivor.life);
        conn.try_send(&command)?;
        Ok(Self {
            conn,
            client,
            id,
            the_use,
        })
    }

    /// If its connection was ended, it is unknown whether it was granted.
    fn end(mut self, survivor: &mut PipelinedSession) -> io::Result<()> {
        let Ok(reply) = self.conn.try_read(REPLY_WITHIN) else {
            return Ok(());
        };
        told(&self.id, self.the_use.acquired(&reply));
        if Use::held(&reply).is_some() {
            survivor.give_back(&self.the_use)?;
        }
        Ok(())
    }
}

/// Until the owner waits no more. It does not always wait to the end.
fn await_end(
    random: &mut Random,
    survivor: &mut PipelinedSession,
    together: &Use,
) -> io::Result<()> {
    let mut looks = 0;
    while survivor.waits_as(&together.owner) {
        looks += 1;
        if looks == 3 && random.percent(80) {
            let lock = *random.pick(&together.locks);
            let cancel = format!("RLOCK.CANCEL {lock} {}", together.owner);
            survivor.commands.try_send(&cancel)?;
            survivor.read()?;
        }
        survivor.hear(5, |_| up_to(random, 10))?;
        survivor.release_due()?;
    }
    Ok(())
}

/// Until these wait no more.
fn await_all(
    random: &mut Random,
    survivor: &mut PipelinedSession,
    owners: &[String],
) -> io::Result<()> {
    while owners.iter().any(|owner| survivor.waits_as(owner)) {
        survivor.hear(5, |_| up_to(random, 10))?;
        survivor.release_due()?;
    }
    Ok(())
}
