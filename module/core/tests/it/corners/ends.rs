//! Holds that end outside of a command.

use super::*;

/// Alice and perhaps bob hold a permit for a session that ends, and alice's is found. Then this is
/// read for the last of them. Returns the writes for it.
fn last_end(owners: &[&str], last: Stored) -> Vec<Write> {
    let held = Stored::Permits(permits(None, Some(END), END));
    let requests: Vec<String> = owners
        .iter()
        .map(|owner| format!("k {owner} 1000 PERMITS 1 SESSION s"))
        .collect();
    let holds: Vec<_> = requests.iter().map(|of| (of.as_str(), held)).collect();
    let (locks, _, tokens) = session_with(&holds);
    let mut locks = ends(locks);
    let mut read = 0;
    let own = PermitsHold {
        permits: Permits::new(1).unwrap(),
        ends_at: END,
        token: tokens[0],
    };
    let all = Stored::Permits(permits(Some(own), Some(END), END));
    let (purposes, effects) = fires(&mut locks, NOW, |task| {
        assert_eq!(task.purpose, Purpose::Release(Mode::Permits));
        read += 1;
        Read::One(if read == owners.len() { &last } else { &all })
    });
    assert_eq!(purposes.len(), owners.len());
    let writes: Vec<Write> = writes(&effects).into_iter().cloned().collect();
    // The first takes its field away, and leaves the key's end to the last one.
    let first = [Write::Remove(Field::Owner(Holder::Caller))];
    let (before, last) = writes.split_at(owners.len() - 1);
    assert_eq!(before, &first[..owners.len() - 1]);
    last.to_vec()
}

#[test]
fn the_last_of_several_ends_sets_the_end_of_permits_even_if_it_ends_nothing() {
    let of_carol = Stored::Permits(permits(None, Some(END - 500), END));
    assert_eq!(
        last_end(&["alice", "bob"], of_carol),
        [Write::ExpireAt(END - 500)]
    );
    // Nobody holds any: the key goes.
    assert_eq!(
        last_end(&["alice", "bob"], Stored::NoHolder),
        [Write::Delete]
    );
}

/// Others have given alice another hold, and set the key's end.
#[test]
fn an_end_that_ends_nothing_leaves_the_end_of_permits() {
    let other = PermitsHold {
        permits: Permits::new(1).unwrap(),
        ends_at: END,
        token: Token::new(3).unwrap(),
    };
    let newer = Stored::Permits(permits(Some(other), None, END - 500));
    assert_eq!(last_end(&["alice"], newer), []);
    assert_eq!(last_end(&["alice"], Stored::NoHolder), []);
}

/// It looks at the others only if the key may have to end earlier.
#[test]
fn a_single_end_need_not_read_all_readers() {
    let (locks, _, _) = session_with(&[("k alice 1000 READ SESSION s", Stored::Free)]);
    let task = ends(locks).next_task(&mut Turn::of_timer(), NOW).unwrap();
    assert_eq!(task.purpose, Purpose::Release(Mode::Read));
    assert_eq!(task.depth, ReadDepth::WholeUnlessOutlived);
}

/// In the other order the writer would become a reader in between.
#[test]
fn a_writers_reading_ends_before_its_writing() {
    let writes = |own_read| {
        let hold = rlock_core::WriteHold {
            count: Count::Valid(1),
            token: Token::new(7),
        };
        Stored::ReadWrite(ReadWrite {
            own_write: Some(hold),
            ..read_write(own_read, None, END)
        })
    };
    let (locks, _, _) = session_with(&[
        ("k alice 1000 WRITE SESSION s", Stored::Free),
        ("k alice 1000 READ SESSION s", writes(None)),
    ]);
    let stored = writes(Some(END));
    let (purposes, _) = fires(&mut ends(locks), NOW, |_| Read::One(&stored));
    let of = Purpose::Release;
    assert_eq!(purposes, [of(Mode::Read), of(Mode::Write)]);
}

/// When a command's time is up, it still ends what its own owner should no longer have, and leaves
/// the others' to the timer.
#[test]
fn a_command_whose_time_is_up_ends_only_its_own_owners_hold() {
    let held = |own: Option<Token>| {
        Stored::Permits(permits(
            own.map(|token| PermitsHold {
                permits: Permits::new(1).unwrap(),
                ends_at: END,
                token,
            }),
            Some(END),
            END,
        ))
    };
    for (owner, should) in [("carol", 0), ("bob", 1)] {
        let (locks, _, tokens) = session_with(&[
            ("k alice 1000 PERMITS 1 SESSION s", held(None)),
            ("k bob 1000 PERMITS 1 SESSION s", held(None)),
        ]);
        let mut locks = ends(locks);
        let request = format!("k {owner} PERMITS 1");
        let request = Release::parse(words(&request)).unwrap();
        let mut turn = Turn::of(Command::Release(&request), 0, 10).with_budget(0);
        let (mut ended, stored) = (0, held(Some(tokens[1])));
        while let Some(task) = locks.next_task(&mut turn, NOW) {
            if task.purpose == Purpose::Command {
                break;
            }
            ended += 1;
            locks.decide(
                &mut turn,
                task.found(Read::One(&stored)),
                NOW,
                &mut Vec::new(),
            );
        }
        assert_eq!(ended, should, "{owner}");
    }
}
