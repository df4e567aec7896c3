//! The questions that a server asks the core while it reads, and when a grant was delivered: each
//! with all its answers.

use crate::wanted::{NOW, words};
use rlock_core::request::{
    Acquire, Cancel, Guard, Limit, MultiAcquire, MultiRelease, MultiRenew, Release, Renew,
};
use rlock_core::{
    Command, Count, Grant, Hash, Known, LockKey, LockRef, Locks, Mode, NEVER, Permits, PermitsHash,
    PermitsReading, PermitsRequest, Purpose, ReadDepth, ReadWrite, Stored, Task, Token, Turn,
    is_permits_mode, is_value_of_lock,
};
use std::rc::Rc;

fn at(name: &[u8]) -> LockRef<'_> {
    LockRef { db: 0, name }
}

fn token(number: i64) -> Token {
    Token::new(number).unwrap()
}

fn grant_of(taken: Option<&[(&[u8], i64)]>) -> Grant {
    let each = |of: &(&[u8], i64)| (LockKey::from(at(of.0)), token(of.1));
    Grant {
        token: token(9),
        mode: Mode::Plain,
        taken: taken.map(|taken| taken.iter().map(each).collect::<Rc<[_]>>()),
    }
}

/// The locks that would still be given back.
fn left(grant: &Grant) -> Vec<&[u8]> {
    let taken = grant.taken.iter().flat_map(|taken| taken.iter());
    taken.map(|(key, _)| &*key.name).collect()
}

#[test]
fn a_grant_of_one_lock_is_confirmed_by_a_reply_about_that_lock() {
    let mut grant = grant_of(None);
    let granted = LockKey::from(at(b"a"));
    assert_eq!(grant.confirm(&granted, at(b"b"), true), None);
    let elsewhere = LockRef { db: 1, name: b"a" };
    assert_eq!(grant.confirm(&granted, elsewhere, true), None);
    assert_eq!(grant.confirm(&granted, at(b"a"), false), Some(true));
}

/// `b` was held before: its token is the former one, so only a hold count tells of the new entry.
#[test]
fn a_grant_of_several_locks_is_confirmed_lock_by_lock() {
    let mut grant = grant_of(Some(&[(b"a", 9), (b"b", 4)]));
    let granted = LockKey::from(at(b"a"));
    assert_eq!(grant.confirm(&granted, at(b"c"), true), None);
    assert_eq!(grant.confirm(&granted, at(b"b"), false), None);
    assert_eq!(left(&grant), [b"a", b"b"]);
    assert_eq!(grant.confirm(&granted, at(b"a"), false), Some(false));
    assert_eq!(left(&grant), [b"b"]);
    assert_eq!(grant.confirm(&granted, at(b"a"), true), None);
    assert_eq!(grant.confirm(&granted, at(b"b"), true), Some(true));
    assert!(left(&grant).is_empty());
}

#[test]
fn the_others_are_read_in_whole_only_where_the_key_may_have_to_end_with_them() {
    use ReadDepth::{Brief, Own, Whole, WholeUnlessOutlived};
    for (has_own, is_outlived) in [(false, false), (false, true), (true, false), (true, true)] {
        let is_brief = |depth: ReadDepth| depth.others_are_brief(has_own, is_outlived);
        assert!(is_brief(Own) && is_brief(Brief) && !is_brief(Whole));
        let must_shorten = has_own && !is_outlived;
        assert_eq!(is_brief(WholeUnlessOutlived), !must_shorten);
    }
}

/// The same for permits: the key outlives a hold if it ends later, or never.
#[test]
fn the_other_holders_of_permits_are_read_where_the_key_may_have_to_end_with_them() {
    let needs = |asked, own_end: Option<i64>, key_end, depth| {
        let mut reading = PermitsReading::new(b"alice", asked, None, NOW);
        let own = own_end.map(|end| format!("1:{end}:t7"));
        if let Some(own) = &own {
            reading.field(b"alice", own.as_bytes());
        }
        reading.needs_others(depth, key_end)
    };
    let (end, depth) = (2_000_000, ReadDepth::WholeUnlessOutlived);
    assert!(needs(None, Some(end), Some(end), depth));
    assert!(!needs(None, Some(end), Some(end + 1), depth));
    assert!(!needs(None, Some(end), None, depth));
    assert!(!needs(None, None, Some(end), depth));
    assert!(!needs(None, Some(end), Some(end), ReadDepth::Brief));
    let asked = PermitsRequest {
        permits: Permits::new(1).unwrap(),
        limit: None,
    };
    assert!(needs(Some(asked), None, Some(end), ReadDepth::Brief));
}

#[test]
fn an_owner_of_permits_may_be_named_like_a_field_of_a_lock() {
    let mut reading = PermitsReading::new(b"alice", None, None, NOW);
    for field in [&b"mode"[..], b"fence"] {
        reading.field(field, b"1:2000000:t7");
    }
    let hash = reading.found(Some(2_000_000));
    assert!(hash.is_free() && hash.is_there, "{hash:?}");
}

#[test]
fn permits_are_told_whether_their_key_is_there() {
    let hash = PermitsHash {
        over: 3,
        ..PermitsHash::default()
    };
    assert!(!hash.with_hash(false).is_there);
    let there = PermitsHash {
        is_there: true,
        ..hash
    };
    assert_eq!(hash.with_hash(true), there);
}

/// Redisson writes `1` into a timeout key.
#[test]
fn a_timeout_key_of_redisson_names_no_token() {
    for value in ["1", "0", "-2", "t2", "02", ""] {
        assert_eq!(Token::from_timeout(value.as_bytes()), None, "{value}");
    }
    assert_eq!(Token::from_timeout(b"2"), Token::new(2));
}

#[test]
fn a_value_of_a_lock_is_told_from_data() {
    for value in ["1", "2147483648", "2:t7", "1:2000000:t7"] {
        assert!(is_value_of_lock(value.as_bytes()), "{value}");
    }
    for value in [
        "",
        "0",
        "-1",
        "01",
        "a",
        "2:7",
        "2:t0",
        "1:2000000:7",
        ":t7",
    ] {
        assert!(!is_value_of_lock(value.as_bytes()), "{value}");
    }
    assert!(is_permits_mode(rlock_core::PERMITS_MODE));
    assert!(!is_permits_mode(b"read") && !is_permits_mode(b""));
}

/// Such a hash may be no lock at all, so its fields are looked at before it is taken.
#[test]
fn a_hash_that_may_have_no_end_is_known() {
    let plain = |ends_at| {
        Stored::Plain(Hash {
            own: None,
            token: Known::NOT_READ,
            others: true,
            ends_at,
        })
    };
    let read_write = |ends_at| {
        Stored::ReadWrite(ReadWrite {
            own_write: None,
            own_read: None,
            others_write: false,
            others_token: None,
            others_read: Some(NEVER),
            ends_at,
            is_partial: false,
        })
    };
    let permits = |ends_at| {
        Stored::Permits(PermitsHash {
            others_end: Some(NEVER),
            ends_at,
            is_there: true,
            ..PermitsHash::default()
        })
    };
    for endless in [
        plain(Known::read(None)),
        read_write(Known::read(None)),
        permits(None),
        Stored::NoHolder,
    ] {
        assert!(endless.may_be_without_end(), "{endless:?}");
    }
    for ends in [
        plain(Known::read(Some(1))),
        plain(Known::NOT_READ),
        read_write(Known::read(Some(1))),
        read_write(Known::NOT_READ),
        permits(Some(1)),
        Stored::Free,
        Stored::OtherType,
        Stored::Data,
    ] {
        assert!(!ends.may_be_without_end(), "{ends:?}");
    }
}

/// The task of a command itself.
fn task_of(command: Command<'_>) -> Task {
    let task = Locks::default().next_task(&mut Turn::of(command, 0, 10), NOW);
    let task = task.unwrap();
    assert_eq!(task.purpose, Purpose::Command);
    task
}

/// The questions that the task of a command answers with yes. "end" and "readers' ends" are asked
/// about a lock that only its owner has, entered once: for any other lock they are always needed.
/// "token" is asked about a lock that others have.
fn needs_of(command: Command<'_>) -> Vec<&'static str> {
    let task = task_of(command);
    let once = Some(Count::Valid(1));
    for own in [None, Some(Count::Valid(2)), Some(Count::Malformed)] {
        assert!(task.needs_end(own, false) && task.needs_readers_ends(own, false));
    }
    assert!(task.needs_end(once, true) && task.needs_readers_ends(once, true));
    assert!(task.needs_token(once));
    let answers = [
        ("may take", task.may_take()),
        ("end", task.needs_end(once, false)),
        ("readers' ends", task.needs_readers_ends(once, false)),
        ("token", task.needs_token(None)),
        ("newcomer's", task.is_newcomers()),
        ("permits", task.is_about_permits()),
    ];
    let yes = answers.into_iter().filter(|(_, is_so)| *is_so);
    yes.map(|(question, _)| question).collect()
}

#[test]
fn each_command_reads_no_more_than_it_needs() {
    let acquire = Acquire::parse(words("k alice 1000")).unwrap();
    let needs = ["may take", "readers' ends", "newcomer's"];
    assert_eq!(needs_of(Command::Acquire(&acquire)), needs);
    let permits = Acquire::parse(words("k alice 1000 PERMITS 1 OF 3")).unwrap();
    let needs = ["may take", "readers' ends", "newcomer's", "permits"];
    assert_eq!(needs_of(Command::Acquire(&permits)), needs);
    let release = Release::parse(words("k alice")).unwrap();
    assert!(needs_of(Command::Release(&release)).is_empty());
    let renew = Renew::parse(words("k alice 1000")).unwrap();
    assert_eq!(needs_of(Command::Renew(&renew)), ["readers' ends"]);
    let guard = Guard::parse(words("k alice TOKEN 7 CALL SET x y")).unwrap();
    let needs = ["readers' ends", "token"];
    assert_eq!(needs_of(Command::Guard(&guard)), needs);
    let limit = Limit::parse(words("k 3")).unwrap();
    let needs = ["end", "readers' ends", "permits"];
    assert_eq!(needs_of(Command::Limit(&limit)), needs);
    let several = MultiAcquire::parse(words("alice 1000 2 a b")).unwrap();
    let needs = ["may take", "end", "readers' ends"];
    assert_eq!(needs_of(Command::MultiAcquire(&several)), needs);
    let cancel = Cancel::parse(words("k alice")).unwrap();
    let give_several = MultiRelease::parse(words("alice 2 a b")).unwrap();
    let renew_several = MultiRenew::parse(words("alice 1000 2 a b")).unwrap();
    for other in [
        Command::Cancel(&cancel),
        Command::Break(b"k"),
        Command::MultiRelease(&give_several),
        Command::MultiRenew(&renew_several),
    ] {
        assert_eq!(needs_of(other), ["end", "readers' ends"], "{other:?}");
    }
}

#[test]
fn the_first_waiter_of_a_queue_says_whether_it_is_for_permits() {
    assert!(!Locks::default().queue_is_for_permits(at(b"k")));
    for (wait, is_for_permits) in [
        ("k alice 1000 BLOCK 0 PERMITS 1 OF 1", true),
        ("k alice 1000 BLOCK 0", false),
    ] {
        let wait = Acquire::parse(words(wait)).unwrap();
        let held = match wait.mode {
            Mode::Permits => Stored::Permits(PermitsHash {
                others_end: Some(2_000_000),
                room: rlock_core::Room::At(2_000_000),
                ends_at: Some(2_000_000),
                is_there: true,
                ..PermitsHash::default()
            }),
            _ => Stored::Plain(Hash {
                own: None,
                token: Known::NOT_READ,
                others: true,
                ends_at: Known::read(Some(2_000_000)),
            }),
        };
        let mut locks = Locks::default();
        let (mut turn, _) = crate::wanted::decide(&mut locks, Command::Acquire(&wait), &[held]);
        let client = rlock_core::BlockedClient {
            handle: 1,
            client_id: 1,
        };
        locks.enqueue(&mut turn, Some(client), NOW, &mut Vec::new());
        assert_eq!(locks.queue_is_for_permits(at(wait.key)), is_for_permits);
    }
}

#[test]
fn a_wait_lasts_as_long_as_it_was_made() {
    assert_eq!(
        rlock_core::Wait::from_ms(7).map(rlock_core::Wait::ms),
        Some(7)
    );
}

#[test]
fn a_session_with_a_hold_is_known() {
    assert!(!Locks::default().any_hold_of_session());
    let (mut locks, _) = crate::wanted::asked();
    assert!(locks.any_hold_of_session());
    locks.client_gone(1, NOW, &mut Vec::new());
    assert!(!locks.any_hold_of_session());
}

#[test]
fn the_rest_of_the_grant_delay_is_told() {
    let mut locks = Locks::default();
    assert_eq!(locks.grant_delay_left_ms(NOW), 0);
    locks.start_grant_delay(NOW, 50);
    assert_eq!(locks.grant_delay_left_ms(NOW), 50);
    assert_eq!(locks.grant_delay_left_ms(NOW.after(49)), 1);
    assert_eq!(locks.grant_delay_left_ms(NOW.after(50)), 0);
}
