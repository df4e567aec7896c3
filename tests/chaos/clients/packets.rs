//! What ends in one moment: sessions are ended in the same packet, and so in the same turn of the
//! server's event loop, in which the locks that they held are asked for.

use std::io;
use std::thread;

use rlock_tests::Reply;

use super::Life;
use super::commands::{Locks, Use, refusal};
use super::members::{Member, up_to};
use super::told;
use crate::history::now;
use crate::random::Random;

/// Those of which several are taken at once, and read-write locks.
pub(crate) const LOCKS_IN_PACKETS: Locks = &[
    "t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "w0", "w1", "w2", "w3",
];

const PLAIN: usize = 8;

/// A wait does not outlive the next few packets of others.
const WAIT_MS: std::ops::Range<u64> = 200..700;

pub(super) fn run(life: &Life, mut random: Random) {
    while life.goes_on() {
        let broken = Member::begin(life, 0).and_then(|mut survivor| {
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
fn writer_who_reads(life: &Life, random: &mut Random, survivor: &mut Member) -> io::Result<()> {
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
    let waits = (0..random.within(2, 5)).map(|_| {
        let mode = *random.pick(&["WRITE", "WRITE", "READ"]);
        Use::of(life.owner(), &[lock], mode)
    });
    let waits: Vec<_> = waits.collect();
    let owners: Vec<_> = waits.iter().map(|the_use| the_use.owner.clone()).collect();
    line_up(random, survivor, waits)?;
    let mut packet = kills(random, &dying);
    if random.percent(30) {
        packet.push("SWAPDB 0 0".to_owned());
    }
    survivor.commands.try_send_all(&packet)?;
    for _ in packet {
        survivor.read()?;
    }
    await_all(random, survivor, &owners)
}

/// An owner holds some locks and waits for those and others, which sessions hold that end; others
/// wait behind it; and in the same packet it asks for something else.
fn several(life: &Life, random: &mut Random, survivor: &mut Member) -> io::Result<()> {
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
        line_up(random, survivor, vec![together.clone()])?;
        let behind = all.iter().chain(&all).filter(|_| random.percent(70));
        let behind = behind.map(|lock| Use::of(life.owner(), &[lock], ""));
        let behind: Vec<_> = behind.collect();
        line_up(random, survivor, behind)?;
        strike(random, survivor, &dying, &together, &wanted)?;
        await_all(random, survivor, std::slice::from_ref(&owner))?;
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

fn begin(life: &Life, random: &mut Random) -> io::Result<Member> {
    Member::begin(life, *random.pick(&[0, 0, 0, 20]))
}

fn line_up(random: &mut Random, survivor: &mut Member, uses: Vec<Use>) -> io::Result<()> {
    let wait = random.within(WAIT_MS.start, WAIT_MS.end);
    survivor.line_up(uses, wait, |_| up_to(random, 10))
}

/// In any order. They are over from now on.
fn kills(random: &mut Random, dying: &[Member]) -> Vec<String> {
    let mut left: Vec<_> = dying.iter().collect();
    let mut kills = Vec::new();
    while !left.is_empty() {
        let member = left.swap_remove(index(random, left.len()));
        member.life.closes();
        kills.push(format!("CLIENT KILL ID {}", member.id));
    }
    kills
}

/// What else is in the packet, and what its answer means.
enum Answer<'a> {
    Nothing,
    Acquired(&'a Use),
    Released,
    Renewed,
    Broken,
}

fn strike(
    random: &mut Random,
    survivor: &mut Member,
    dying: &[Member],
    together: &Use,
    wanted: &[&'static str],
) -> io::Result<()> {
    let kills = kills(random, dying);
    let mut packet: Vec<_> = kills
        .into_iter()
        .map(|kill| (String::new(), kill, Answer::Nothing))
        .collect();
    for _ in 0..random.within(1, 4) {
        let (asked, answer) = match random.within(0, 10) {
            0..3 => (together.release(), Answer::Released),
            3..6 => {
                let rest = format!("SESSION {}", survivor.life.name);
                (together.acquire("none", &rest), Answer::Acquired(together))
            }
            6..8 => (together.renew(), Answer::Renewed),
            8 => {
                let lock = *random.pick(wanted);
                let id = survivor.life.breaks(lock);
                packet.push((id, format!("RLOCK.BREAK {lock}"), Answer::Broken));
                continue;
            }
            _ => {
                packet.push((String::new(), "SWAPDB 0 0".to_owned(), Answer::Nothing));
                continue;
            }
        };
        let (id, command) = asked.begin(&survivor.life);
        packet.push((id, command, answer));
    }
    let commands: Vec<_> = packet.iter().map(|(_, command, _)| command).collect();
    survivor.commands.try_send_all(&commands)?;
    for (id, _, answer) in &packet {
        let reply = survivor.read()?;
        match (answer, &reply) {
            (Answer::Nothing, _) => {}
            (Answer::Broken, _) => println!("| broke {id} {}", now()),
            (Answer::Acquired(the_use), _) => told(id, the_use.acquired(&reply)),
            (Answer::Released, Reply::Int(count @ 1..)) => told(id, format!("gave {count}")),
            (Answer::Released, Reply::Int(0)) => told(id, "lost"),
            (Answer::Renewed, Reply::Int(count)) => told(id, format!("renewed {count}")),
            _ => {
                if let Some(error) = refusal(&reply) {
                    told(id, error);
                }
            }
        }
    }
    Ok(())
}

/// Until these wait no more.
fn await_all(random: &mut Random, survivor: &mut Member, owners: &[String]) -> io::Result<()> {
    while owners.iter().any(|owner| survivor.waits_as(owner)) {
        survivor.hear(5, |_| up_to(random, 10))?;
        survivor.release_due()?;
    }
    Ok(())
}
