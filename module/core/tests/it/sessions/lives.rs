//! Events are kept until they are acknowledged, in one life after the other.

use super::{
    A, B, C, after, allows, asks, breaks, does, hears, holders, listens, news, queues, releases,
    takes, takes_for_session, told,
};
use crate::life::{After, Epoch, News};
use crate::twin::{Reply, Waits};
use crate::wanted::{LIMITS, NOW, asked, decide, words};
use crate::world::{OWNERS, Op, World};
use rlock_core::request::{Acquire, Events};
use rlock_core::{
    Command, CommandError, EventKind, LockRef, Locks, Mode, Purpose, Read, Stored, Turn,
};

/// The session holds these locks for 50 ms after its connection, and the last one for longer.
fn holds(locks: &[usize]) -> World {
    let takes = locks.iter().map(|lock| takes_for_session(A, *lock));
    let all: Vec<Op> = [listens(None, 50), takes_for_session(A, 3)]
        .into_iter()
        .chain(takes)
        .collect();
    after(&all)
}

/// A session with this number of broken holds, and none of these events was delivered.
fn lost(number: usize) -> World {
    let locks: Vec<usize> = (0..number).collect();
    let mut world = holds(&locks);
    for lock in locks {
        does(&mut world, &breaks(lock));
    }
    world
}

const BROKEN: News = News::Lost("broken");

#[test]
fn a_reply_that_was_lost_is_told_again_with_after() {
    let mut world = lost(2);
    let first = told(&mut world, &asks(0, None, None));
    assert_eq!((first.after, first.events.len()), (0, 2));
    does(&mut world, &Op::Close { client: 0 });
    let again = told(&mut world, &asks(1, None, Some(After::Seq(0))));
    assert_eq!(again, first);
    let heard = hears(&mut world, 1, Some(After::Seq(1)));
    assert_eq!(heard, (1, vec![BROKEN]));
    assert_eq!(hears(&mut world, 1, Some(After::Told)), (2, Vec::new()));
}

#[test]
fn after_names_any_number_before_the_events_are_told_and_after_that() {
    const EVENTS: u64 = 3;
    for is_told in [false, true] {
        for seq in 0..=EVENTS + 1 {
            let mut world = lost(3);
            if is_told {
                hears(&mut world, 0, None);
            }
            let heard = seq.min(EVENTS);
            let left = usize::try_from(EVENTS - heard).unwrap();
            let should = (heard, vec![BROKEN; left]);
            assert_eq!(hears(&mut world, 0, Some(After::Seq(seq))), should);
            // An event that was dropped does not come back.
            assert_eq!(hears(&mut world, 0, Some(After::Seq(0))), should);
        }
    }
}

#[test]
fn after_of_another_life_drops_nothing_and_is_answered_at_once() {
    let waits = |after| Op::Events {
        session: 0,
        client: 0,
        block_ms: Some(0),
        grace_ms: 50,
        epoch: None,
        after: Some(after),
    };
    for events in [0, 2] {
        for seq in [0, 1, 7] {
            let mut world = lost(events);
            let life = told(&mut world, &asks(0, None, None)).life;
            let again = told(&mut world, &waits(After::OtherLife(seq)));
            assert_eq!((again.life, again.after), (life, 0));
            assert_eq!(news(again), vec![BROKEN; events]);
            assert_eq!(does(&mut world, &waits(After::Told)), Reply::Waits);
        }
    }
}

#[test]
fn without_after_a_call_acknowledges_all_that_was_told() {
    let mut world = lost(1);
    assert_eq!(hears(&mut world, 0, None), (0, vec![BROKEN]));
    does(&mut world, &breaks(3));
    assert_eq!(hears(&mut world, 1, None), (1, vec![BROKEN]));
    assert_eq!(hears(&mut world, 0, None), (2, Vec::new()));
}

#[test]
fn a_call_with_a_smaller_epoch_is_stale_and_changes_nothing() {
    let mut world = lost(1);
    told(&mut world, &asks(1, Some(Epoch::Larger), None));
    let session = world.twin.life.sessions[&0].clone();
    let stale = does(&mut world, &asks(0, Some(Epoch::Smaller), None));
    let should = "STALE a later connection has named EPOCH 8 for this session";
    assert_eq!(stale, Reply::Refused(should.into()));
    let present = &world.twin.life.sessions[&0];
    assert_eq!(
        (present.client, present.epoch),
        (session.client, session.epoch)
    );
    // The same number and none are no late calls.
    let same = told(
        &mut world,
        &asks(0, Some(Epoch::Equal), Some(After::Seq(0))),
    );
    assert_eq!(news(same), [BROKEN]);
    told(&mut world, &asks(2, None, None));
    let larger = asks(1, Some(Epoch::Larger), None);
    told(&mut world, &larger);
    assert_eq!(world.twin.life.sessions[&0].epoch, Some(9));
}

/// How far a connection comes before it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dies {
    Never,
    BeforeTheCall,
    BeforeTheReply,
}

/// Three events, and before and after each the connection may die. The client names the last event
/// that it has heard.
#[test]
fn a_connection_that_dies_at_any_step_loses_no_event_and_brings_none_twice() {
    let deaths = [Dies::Never, Dies::BeforeTheCall, Dies::BeforeTheReply];
    for case in 0..27 {
        let mut world = holds(&[0, 1, 2]);
        let (mut heard, mut locks) = (0, Vec::new());
        for (lock, which) in [case % 3, case / 3 % 3, case / 9].into_iter().enumerate() {
            does(&mut world, &breaks(lock));
            let dies = deaths[which];
            if dies == Dies::BeforeTheCall {
                does(&mut world, &Op::Close { client: 0 });
            }
            let told = told(&mut world, &asks(0, None, Some(After::Seq(heard))));
            if dies == Dies::BeforeTheReply {
                does(&mut world, &Op::Close { client: 0 });
            } else {
                assert_eq!(told.after, heard);
                heard += u64::try_from(told.events.len()).unwrap();
                locks.extend(told.events.into_iter().map(|event| event.place));
            }
        }
        let rest = told(&mut world, &asks(1, None, Some(After::Seq(heard))));
        locks.extend(rest.events.into_iter().map(|event| event.place));
        let should = [0, 1, 2].map(crate::world::place);
        assert_eq!(locks, should, "case {case}");
    }
}

#[test]
fn a_grant_told_or_not_is_held_for_the_grace_and_ends_with_it() {
    for is_told in [false, true] {
        let mut world = after(&[listens(None, 50), takes(C, 0), queues(A, 0), releases(C, 0)]);
        if is_told {
            assert_eq!(hears(&mut world, 0, None), (0, vec![News::Granted]));
        }
        does(&mut world, &Op::Close { client: 0 });
        does(&mut world, &Op::Pass { ms: 49 });
        assert_eq!(holders(&world, 0), [OWNERS[A]]);
        does(&mut world, &Op::Pass { ms: 1 });
        assert_eq!(holders(&world, 0), [[]; 0]);
        assert_eq!(world.counters().session_releases, 1);
    }
}

#[test]
fn each_wait_leaves_with_an_event_when_the_session_connection_closes() {
    let both = Op::MultiAcquire {
        locks: vec![0, 1],
        owner: C,
        lease_ms: 1_000_000,
        waits: Waits::Queue(0),
        session: Some(0),
        once: false,
    };
    let story = [
        listens(None, 50),
        takes_for_session(C, 3),
        takes(B, 0),
        takes(B, 1),
        queues(A, 0),
        queues(A, 1),
        both,
        Op::Close { client: 0 },
    ];
    let mut world = after(&story);
    assert_eq!(world.line(0).len() + world.line(1).len(), 0);
    let told = told(&mut world, &asks(1, None, Some(After::Seq(0))));
    assert_eq!(told.after, 0);
    let left = told.events.iter();
    let left = left.map(|event| (&*event.owner, event.place.clone(), event.token));
    let [first, second] = [0, 1].map(crate::world::place);
    let should = [
        (OWNERS[A], first.clone(), None),
        (OWNERS[A], second, None),
        (OWNERS[C], first, None),
    ];
    let mut left: Vec<_> = left.collect();
    left.sort();
    assert_eq!(left, should);
    assert_eq!(news(told), [News::Left, News::Left, News::Left]);
}

#[test]
fn a_demotion_begins_another_life_of_a_session_with_holds() {
    let mut world = lost(1);
    let before = told(&mut world, &asks(0, None, None)).life;
    does(&mut world, &breaks(3));
    let again = [takes_for_session(A, 3), Op::Demote];
    for op in again {
        does(&mut world, &op);
    }
    does(&mut world, &Op::StartTokens { guard_ms: 0 });
    let refused = does(&mut world, &takes_for_session(A, 0));
    assert!(matches!(refused, Reply::Refused(text) if text.starts_with("NOSESSION")));
    let waits = Op::Events {
        session: 0,
        client: 0,
        block_ms: Some(0),
        grace_ms: 50,
        epoch: None,
        after: Some(After::Told),
    };
    let anew = told(&mut world, &waits);
    assert!(anew.life > before, "{anew:?} after {before}");
    assert_eq!((anew.after, anew.events), (0, Vec::new()));
    assert!(matches!(
        does(&mut world, &takes_for_session(A, 0)),
        Reply::Held { .. }
    ));
}

#[test]
fn a_demotion_wakes_the_client_that_waits_for_events() {
    let mut world = holds(&[]);
    does(&mut world, &listens(Some(0), 50));
    does(&mut world, &Op::Demote);
    let Reply::Events(told) = does(&mut world, &Op::Deliver) else {
        panic!("it was not woken");
    };
    assert_eq!((told.len(), told[0].after), (1, 0));
}

#[test]
fn a_session_without_holds_keeps_its_life_through_a_demotion() {
    let mut world = after(&[listens(None, 50), takes(C, 0), queues(A, 0)]);
    let life = told(&mut world, &asks(0, None, None)).life;
    does(&mut world, &Op::Demote);
    let after = told(&mut world, &asks(0, None, None));
    assert_eq!((after.life, after.after), (life, 0));
    assert!(matches!(&news(after)[..], [News::Error(text)] if text.starts_with("UNBLOCKED")));
}

#[test]
fn no_life_is_given_twice() {
    let mut lives = Vec::new();
    let mut world = after(&[]);
    for ms in [-5000, 0, 5000] {
        for guard_ms in [0, 10] {
            lives.push(told(&mut world, &asks(0, None, None)).life);
            does(&mut world, &Op::Close { client: 0 });
            does(&mut world, &Op::Failover { guard_ms });
        }
        does(&mut world, &Op::StepClock { ms });
    }
    assert!(lives.is_sorted_by(|one, next| one < next), "{lives:?}");
}

#[test]
fn one_reply_has_a_thousand_events_and_the_next_call_tells_the_rest_at_once() {
    let mut world = after(&[allows(10, 3000), listens(None, 50)]);
    for _ in 0..2100 {
        does(&mut world, &takes_for_session(A, 0));
        does(&mut world, &breaks(0));
    }
    let (since, events) = hears(&mut world, 0, None);
    assert_eq!((since, events.len()), (0, 1000));
    // The reply was lost with its connection.
    let (since, events) = hears(&mut world, 1, Some(After::Seq(500)));
    assert_eq!((since, events.len()), (500, 1000));
    // Without AFTER a call acknowledges the events that were told.
    let blocks = Op::Events {
        session: 0,
        client: 1,
        block_ms: Some(0),
        grace_ms: 50,
        epoch: None,
        after: None,
    };
    let rest = told(&mut world, &blocks);
    assert_eq!((rest.after, rest.events.len()), (1500, 600));
    assert_eq!(does(&mut world, &blocks), Reply::Waits);
}

#[test]
fn one_reply_has_long_names_up_to_its_bytes_but_one_event_at_least() {
    let (mut locks, session) = asked();
    // Each grant after the first tells that the hold before it was lost.
    for (len, grants) in [(100_000, 8), (1_000_000, 3)] {
        let take = format!("{} bob 1000 SESSION s", "x".repeat(len));
        let take = Acquire::parse(words(&take)).unwrap();
        for _ in 0..grants {
            decide(&mut locks, Command::Acquire(&take), &[Stored::Free]);
        }
    }
    let replies = std::iter::repeat_with(|| {
        let told = locks.take_events(session, NOW).unwrap();
        let listens = Events::parse(words("s")).unwrap();
        let again = locks.attach(&listens, 1, LIMITS, NOW, &mut Vec::new());
        (told.events.len(), again.unwrap().at_once)
    });
    let replies: Vec<_> = replies.take(4).collect();
    // The third name of 100,000 bytes is the one that fills a reply.
    assert_eq!(replies, [(3, true), (3, true), (2, true), (1, false)]);
}

/// Alice's hold is looked at, and its slot has moved to another node.
#[test]
fn a_hold_whose_slot_has_moved_is_told_with_its_token() {
    let (mut locks, session): (Locks, _) = asked();
    let name = &b"k"[..];
    locks.changed(LockRef { db: 0, name });
    let moved = CommandError::Moved {
        slot: 7,
        address: "127.0.0.1:7001".into(),
        tls_address: "127.0.0.1:7002".into(),
    };
    let (mut turn, mut effects) = (Turn::of_timer(), Vec::new());
    let task = locks.next_task(&mut turn, NOW).unwrap();
    assert_eq!(task.purpose, Purpose::CheckHold(Mode::Plain));
    let read = Read::Elsewhere(moved.clone());
    assert!(locks.decide(&mut turn, task.found(read), NOW, &mut effects));
    assert!(locks.next_task(&mut turn, NOW).is_none());
    assert_eq!(locks.gauges().session_holds, 0);
    let told = locks.take_events(session, NOW).unwrap();
    let [event] = &told.events[..] else {
        panic!("{told:?}");
    };
    assert_eq!(event.kind, EventKind::Error(moved));
    assert_eq!((&*event.lock.name, &*event.owner), (name, &b"alice"[..]));
    assert!(event.token.is_some() && event.mode == Mode::Plain);
}

#[test]
fn once_of_the_same_session_takes_its_wait_over_without_an_event() {
    let again = |session| Op::Acquire {
        lock: 0,
        owner: A,
        mode: Mode::Plain,
        lease_ms: 1_000_000,
        waits: Waits::Queue(0),
        session: Some(session),
        once: true,
    };
    let other = Op::Events {
        session: 1,
        client: 1,
        block_ms: None,
        grace_ms: 0,
        epoch: None,
        after: None,
    };
    let mut world = after(&[listens(None, 0), other, takes(B, 0), queues(A, 0), again(0)]);
    assert_eq!(hears(&mut world, 0, None), (0, Vec::new()));
    does(&mut world, &again(1));
    let (_, news) = hears(&mut world, 0, None);
    assert!(matches!(news[..], [News::Timeout(1..)]), "{news:?}");
}
