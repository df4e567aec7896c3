//! BIND: the command connection of a session.

use super::{A, C, after, asks, does, hears, holders, listens, news, releases, takes_for_session};
use super::{queues, takes, told};
use crate::life::{Epoch, News};
use crate::twin::Reply;
use crate::world::{Op, World};
use rlock_core::Mode;

fn binds(client: usize, epoch: Epoch) -> Op {
    Op::Bind {
        session: 0,
        client,
        epoch,
    }
}

/// The connection that was bound before, by its place.
fn former(world: &mut World, client: usize) -> Option<usize> {
    let connections: Vec<_> = (0..4).map(|of| world.client_id(of)).collect();
    match does(world, &binds(client, Epoch::Larger)) {
        Reply::Bound { former, .. } => {
            former.map(|of| connections.iter().position(|id| *id == of).unwrap())
        }
        other => panic!("{other:?}"),
    }
}

fn refused(world: &mut World, op: &Op) -> String {
    match does(world, op) {
        Reply::Refused(text) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn bind_names_the_life_and_closes_the_former_connection() {
    let mut world = after(&[listens(None, 50)]);
    let life = told(&mut world, &asks(0, None, None)).life;
    let bound = does(&mut world, &binds(1, Epoch::Larger));
    let former_is = |former| Reply::Bound { life, former };
    assert_eq!(bound, former_is(None));
    let client_id = world.client_id(1);
    let bound = does(&mut world, &binds(2, Epoch::Larger));
    assert_eq!(bound, former_is(Some(client_id)));
    assert_eq!(world.connection_of(client_id), None, "it was closed");
    // The same connection with a larger number closes nothing.
    assert_eq!(does(&mut world, &binds(2, Epoch::Larger)), former_is(None));
    // Nor does one whose former has closed by itself.
    does(&mut world, &Op::Close { client: 2 });
    assert_eq!(does(&mut world, &binds(1, Epoch::Larger)), former_is(None));
}

#[test]
fn a_bind_with_a_number_that_is_not_larger_is_stale() {
    let mut world = after(&[listens(None, 50), binds(1, Epoch::Larger)]);
    for epoch in [Epoch::Equal, Epoch::Smaller] {
        for client in [1, 2] {
            let text = refused(&mut world, &binds(client, epoch));
            assert!(text.starts_with("STALE "), "{text}");
        }
    }
    // Also when the connection has closed since.
    does(&mut world, &Op::Close { client: 1 });
    let text = refused(&mut world, &binds(2, Epoch::Equal));
    assert!(text.starts_with("STALE "), "{text}");
}

#[test]
fn nobody_binds_to_a_session_without_listener_or_of_another_user() {
    let mut world = after(&[]);
    let text = refused(&mut world, &binds(1, Epoch::Larger));
    assert!(text.starts_with("NOSESSION "), "{text}");
    let closed = [
        listens(None, 50),
        takes_for_session(A, 0),
        Op::Close { client: 0 },
    ];
    let mut world = after(&closed);
    let text = refused(&mut world, &binds(1, Epoch::Larger));
    assert!(text.starts_with("NOSESSION "), "{text}");
    let mut world = after(&[listens(None, 50), Op::As { user: 1 }]);
    let text = refused(&mut world, &binds(1, Epoch::Larger));
    assert!(text.starts_with("NOPERM "), "{text}");
}

#[test]
fn a_connection_is_bound_to_one_session() {
    let other = |op| match op {
        Op::Events { .. } => Op::Events {
            session: 1,
            client: 3,
            block_ms: None,
            grace_ms: 50,
            epoch: None,
            after: None,
        },
        _ => Op::Bind {
            session: 1,
            client: 1,
            epoch: Epoch::Larger,
        },
    };
    let both = [listens(None, 50), other(listens(None, 50))];
    let mut world = after(&[&both[..], &[binds(1, Epoch::Larger)]].concat());
    let text = refused(&mut world, &other(binds(1, Epoch::Larger)));
    assert_eq!(
        text,
        "ERR this connection is bound to another session already"
    );
}

/// With it the session ends, or its grace begins.
#[test]
fn bind_that_closes_the_session_connection_says_that_nobody_listens() {
    for grace_ms in [0, 50] {
        let both = [
            listens(None, grace_ms),
            takes_for_session(A, 0),
            binds(0, Epoch::Larger),
        ];
        let mut world = after(&both);
        let text = refused(&mut world, &binds(1, Epoch::Larger));
        assert!(text.starts_with("NOSESSION "), "{text}");
        // It is bound all the same.
        does(&mut world, &asks(2, None, None));
        let text = refused(&mut world, &binds(2, Epoch::Equal));
        assert!(text.starts_with("STALE "), "{text}");
        let bound = world.client_id(1);
        match does(&mut world, &binds(2, Epoch::Larger)) {
            Reply::Bound { former, .. } => assert_eq!(former, Some(bound)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_former_connection_is_closed_also_after_the_sessions_end() {
    let ended = [
        listens(None, 50),
        binds(1, Epoch::Larger),
        Op::Close { client: 0 },
        listens(None, 50),
    ];
    let mut world = after(&ended);
    assert_eq!(world.twin.life.sessions[&0].bound, None);
    let text = refused(&mut world, &binds(2, Epoch::Equal));
    assert!(text.starts_with("STALE "), "{text}");
    assert_eq!(former(&mut world, 2), Some(1));
}

#[test]
fn another_user_of_the_same_name_closes_nobodys_connection() {
    let taken = [
        listens(None, 50),
        binds(1, Epoch::Larger),
        Op::Close { client: 0 },
        Op::As { user: 1 },
        listens(None, 50),
    ];
    let mut world = after(&taken);
    assert_eq!(former(&mut world, 2), None);
}

/// A hold that its own command connection gives back was not lost.
#[test]
fn a_release_by_another_connection_than_the_bound_one_is_told() {
    let by = |client| Op::By { client };
    let released = vec![News::Lost("released")];
    for (client, should) in [
        (Some(1), Vec::new()),
        (Some(2), released.clone()),
        (Some(0), released),
        (None, Vec::new()),
    ] {
        let several = Op::MultiRelease {
            locks: vec![0],
            owner: A,
        };
        for release in [releases(A, 0), several] {
            let story = [
                listens(None, 50),
                binds(1, Epoch::Larger),
                takes_for_session(A, 0),
                by(client),
                release,
            ];
            let mut world = after(&story);
            assert_eq!(holders(&world, 0), [[]; 0]);
            assert_eq!(hears(&mut world, 0, None), (0, should.clone()));
        }
    }
}

#[test]
fn what_is_told_of_a_release_names_the_hold_and_comes_before_the_next_grant() {
    let by = Op::By { client: Some(2) };
    let story = [
        listens(None, 50),
        binds(1, Epoch::Larger),
        takes_for_session(A, 0),
        queues(C, 0),
        by,
    ];
    let mut world = after(&story);
    let token = world.twin.token(
        &crate::world::place(0),
        crate::world::OWNERS[A],
        Mode::Plain,
    );
    does(&mut world, &releases(A, 0));
    let told = told(&mut world, &asks(0, None, None));
    assert_eq!(told.events[0].token, token);
    assert_eq!(news(told), [News::Lost("released"), News::Granted]);
}

/// The hold is left with one entry less, so it is not lost.
#[test]
fn a_release_that_leaves_a_hold_is_not_told() {
    let twice = [listens(None, 50), takes_for_session(A, 0), takes(A, 0)];
    let by = Op::By { client: Some(2) };
    let mut world = after(&[&twice[..], &[by, releases(A, 0)]].concat());
    assert_eq!(hears(&mut world, 0, None), (0, Vec::new()));
}
