//! Two threads use one scope at once. A command's words depend on the owner's present holds, and
//! the other thread may hand a command over between the two: here it would, once in some hundred
//! times.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use rlock_client::{Client, Error, Guard, MultiGuard, Scope};
use rlock_tests::{Pair, Random, Reply, Server, until};
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet, spawn_blocking, yield_now};
use tokio::time::{sleep, timeout};

use super::client::{MS, calm, client, connect, patient, see_in_queue, soon, two_clients};
use super::client_session::drops;
use super::ways::two_ways;

/// Does it on a thread of its own, together with another.
fn beside<T: Send + 'static>(
    other: &Arc<Barrier>,
    call: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let other = Arc::clone(other);
    spawn_blocking(move || {
        other.wait();
        Handle::current().block_on(call)
    })
}

/// The second enters what the first holds, and the last guard gives it back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_threads_of_a_scope_share_one_hold() {
    let server = Server::start();
    let client = client(&server).await;
    let mut conn = server.connect();
    for round in 0..2_000 {
        let (scope, name) = (client.scope(), format!("k{round}"));
        let start = Arc::new(Barrier::new(2));
        let take = || {
            let lock = scope.lock(&*name);
            beside(&start, async move { lock.lock().await })
        };
        let (first, second) = (take(), take());
        let (first, second) = (first.await.unwrap(), second.await.unwrap());
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!(first.token(), second.token());
        first.unlock().await.unwrap();
        assert_eq!(conn.run(format!("HGET {name} {}", second.owner())), "1");
        second.unlock().await.unwrap();
        assert_eq!(conn.run(format!("EXISTS {name}")), 0);
    }
}

/// A renewal asks for the whole lease, and an entry beside it for the rest of the lease: carried
/// out after the renewal, it would cut the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_that_asks_for_less_cuts_no_others_lease() {
    let server = Server::start();
    let client = client(&server).await;
    let mut conn = server.connect();
    for round in 0..5 {
        let mut held = Vec::new();
        for number in 0..400 {
            let (scope, name) = (client.scope(), format!("k{round}:{number}"));
            let both = scope.multi([&*name, &*format!("l{round}:{number}")]);
            let both = both.lease(Duration::from_secs(100)).lock().await.unwrap();
            held.push((scope, name, Arc::new(both)));
        }
        // By so much the two leases differ.
        sleep(Duration::from_millis(700)).await;
        for (scope, name, both) in held {
            let start = Arc::new(Barrier::new(2));
            let short = scope.lock(&*name).lease(Duration::from_secs(1));
            let again = Arc::clone(&both);
            let renewed = beside(&start, async move { again.renew().await });
            let short = beside(&start, async move { short.try_lock().await });
            renewed.await.unwrap().unwrap();
            let short = short.await.unwrap().unwrap();
            let left = conn.run(format!("PTTL {name}")).int();
            let left = Duration::from_millis(left.unsigned_abs());
            // The guard's allowance for the drift of clocks is longer than the time in between.
            assert!(both.valid_for() <= left, "{:?}, {left:?}", both.valid_for());
            drop((short, both));
        }
    }
}

/// The holds of a task of the storm below: one lock, or several.
enum Taken {
    One(Guard),
    Several(MultiGuard),
}

const NAMES: [&str; 4] = ["{k}a", "{k}b", "{k}c", "{k}d"];

impl Taken {
    /// Takes one to three of the locks, or waits for them, or gives up at any moment.
    async fn take(scope: Scope, mut random: Random) -> Option<Self> {
        let names = NAMES.into_iter().cycle().skip(random.index(NAMES.len()));
        let names: Vec<_> = names.take(1 + random.index(3)).collect();
        let waits = random.below(3) == 0;
        let limit = match random.below(4) {
            0 => Duration::from_micros(random.below(2_000)),
            _ => Duration::from_secs(10),
        };
        let take = async {
            Ok::<_, Error>(match *names {
                [name] if waits => Self::One(scope.lock(name).lock_timeout(30 * MS).await?),
                [name] => Self::One(scope.lock(name).try_lock().await?),
                _ if waits => Self::Several(scope.multi(names).lock_timeout(30 * MS).await?),
                _ => Self::Several(scope.multi(names).try_lock().await?),
            })
        };
        match timeout(limit, take).await {
            Ok(Err(error)) => {
                assert!(error.is_not_acquired() || error.is_deadlock(), "{error}");
                None
            }
            taken => taken.ok()?.ok(),
        }
    }

    fn is_of(&self, name: &str) -> bool {
        match self {
            Self::One(guard) => guard.name() == name.as_bytes(),
            Self::Several(guard) => guard.names().any(|one| one == name.as_bytes()),
        }
    }

    async fn renew(&self) -> Result<(), Error> {
        match self {
            Self::One(guard) => guard.renew().await,
            Self::Several(guard) => guard.renew().await,
        }
    }

    async fn unlock(self) -> Result<(), Error> {
        match self {
            Self::One(guard) => guard.unlock().await,
            Self::Several(guard) => guard.unlock().await,
        }
    }
}

/// One task: takes, drops, unlocks and renews, mostly with a call under way beside it.
async fn take_and_drop(scope: Scope, mut random: Random) -> Vec<Taken> {
    let mut held = Vec::new();
    for _ in 0..60 {
        let seed = Random::new(random.below(u64::MAX));
        let call = tokio::spawn(Taken::take(scope.clone(), seed));
        if random.below(2) == 0 {
            yield_now().await;
        }
        if !held.is_empty() && random.below(3) > 0 {
            let guard: Taken = held.swap_remove(random.index(held.len()));
            match random.below(3) {
                0 => guard.unlock().await.unwrap(),
                1 => guard.renew().await.unwrap(),
                _ => drop(guard),
            }
        }
        held.extend(call.await.unwrap());
    }
    held
}

/// At rest each lock is held once if there are guards of it, and not at all if there are none. No
/// guard was ever called lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_of_one_scope_that_overlap_hold_what_they_have_guards_of() {
    let server = Server::start();
    let clients = two_clients(&server).await;
    for round in 0_u64..12 {
        let scopes = clients.each_ref().map(Client::scope);
        let mut random = Random::new(0x9E37_79B9_7F4A_7C15 ^ round);
        let mut tasks = [JoinSet::new(), JoinSet::new()];
        for (scope, tasks) in scopes.iter().zip(&mut tasks) {
            for _ in 0..3 {
                let random = Random::new(random.below(u64::MAX));
                tasks.spawn(take_and_drop(scope.clone(), random));
            }
        }
        let mut held = Vec::new();
        for tasks in tasks {
            held.push(
                tasks
                    .join_all()
                    .await
                    .into_iter()
                    .flatten()
                    .collect::<Vec<_>>(),
            );
        }
        for (scope, held) in scopes.iter().zip(&held) {
            for name in NAMES {
                let guards = held.iter().filter(|taken| taken.is_of(name)).count();
                let entries = || match server.run(format!("HGET {name} {}", scope.owner())) {
                    Reply::Null => 0,
                    count => count.text().parse::<usize>().unwrap(),
                };
                let guards = guards.min(1);
                assert!(entries() >= guards, "{name} has {guards}, round {round}");
                until("no entry is without a guard", || entries() == guards);
            }
        }
        for taken in held.into_iter().flatten() {
            soon(taken.unlock()).await.unwrap();
        }
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

/// A writer's grant is told by an event, and before that is heard the scope's other calls enter.
/// Counted in the order in which it is heard, it would be one that nobody knows, and each call
/// beside a release would give its grant back and ask again, until its time is up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_enter_before_a_queued_writer_hears_of_its_grant_are_granted() {
    let server = Server::start();
    let builder = calm().response_timeout(1_000 * MS);
    let (client, _near, far) = two_ways(&server, builder).await;
    let mut alice = server.connect();
    alice.run("RLOCK.ACQUIRE w alice 600000 WRITE").held();
    let lock = client.scope().rw_lock("w");
    let queued = lock.clone();
    let waiting = see_in_queue(&server, "w", async move { queued.write().await });
    let writing = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let (lock, writing) = (lock.clone(), Arc::clone(&writing));
            tokio::spawn(async move {
                let (mut granted, mut began) = (0, None);
                while began.is_none_or(|began: Instant| began.elapsed() < 2_500 * MS) {
                    match lock.try_write().await {
                        Ok(_) => granted += 1,
                        Err(error) if granted > 0 => panic!("after {granted}: {error:?}"),
                        Err(_) => {}
                    }
                    let since = writing.load(Ordering::Relaxed).then(Instant::now);
                    began = began.or(since);
                }
                granted
            })
        })
        .collect();
    far.delay(20 * MS);
    alice.run("RLOCK.RELEASE w alice WRITE");
    // From now on the scope writes, and its other calls enter.
    let writer = soon(waiting).await.unwrap().unwrap();
    writing.store(true, Ordering::Relaxed);
    for task in tasks {
        assert!(task.await.unwrap() > 0);
    }
    assert!(!writer.is_lost());
}

/// A writer's hold is broken, and nobody has heard of that yet. One thread drops its guard while
/// another asks for the lock: it enters the lost hold, and is told so, or it is granted the lock
/// anew, which the release of the lost one leaves alone. Longer in `make soak`.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_writers_grant_is_not_taken_by_the_release_of_another_thread() {
    let server = Server::start();
    let (client, _near, far) = two_ways(&server, calm().response_timeout(30_000 * MS)).await;
    far.delay(20 * MS);
    let (mut operator, mut alice) = (server.connect(), server.connect());
    let mut random = Random::new(7);
    for round in 0..drops() / 10 {
        let name = format!("w{round}");
        let lock = client.scope().rw_lock(&*name);
        let first = lock.write().await.unwrap();
        let token = first.token();
        assert_eq!(operator.run(format!("RLOCK.BREAK {name}")), 1);
        let (start, spin) = (Arc::new(Barrier::new(2)), u128::from(random.below(250)));
        let other = Arc::clone(&start);
        let dropping = spawn_blocking(move || {
            other.wait();
            let at = Instant::now();
            while at.elapsed().as_micros() < spin {
                std::hint::spin_loop();
            }
            drop(first);
        });
        let taking = beside(&start, async move { lock.try_write().await });
        if let Ok(guard) = taking.await.unwrap() {
            if guard.token() == token {
                soon(guard.lost()).await;
                dropping.await.unwrap();
                continue;
            }
            let taken = alice.run(format!("RLOCK.ACQUIRE {name} alice 600000 WRITE"));
            let valid_for = guard.valid_for();
            assert!(
                taken.ints()[0] == 0 || valid_for.is_zero(),
                "round {round}: alice has {name}, and a guard says held for {valid_for:?}"
            );
        }
        dropping.await.unwrap();
    }
}

/// Two threads of one scope renew their holds of one lock at once. Where grants must be
/// acknowledged, the shorter of the two leases may be sent last.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_acknowledged_renewal_that_asks_for_less_cuts_no_others_lease() {
    const AT_ONCE: usize = 8;
    let pair = Pair::start();
    let settings = patient().acknowledged_by(1, Duration::from_secs(10));
    let client = connect(settings, &pair.primary).await;
    let mut conn = pair.primary.connect();
    let mut held = Vec::new();
    for number in 0..20 * AT_ONCE {
        let (scope, name) = (client.scope(), format!("k{number}"));
        let both = scope.multi([&*name, &*format!("l{number}")]);
        let both = both.lease(Duration::from_secs(10)).lock().await.unwrap();
        let one = scope.lock(&*name).lease(Duration::from_secs(5));
        let one = one.lock().await.unwrap();
        held.push((name, Arc::new(both), Arc::new(one)));
    }
    for _ in 0..drops() / 2_500 {
        // For longer than what a guard takes off for the drift of clocks.
        sleep(200 * MS).await;
        for some in held.chunks(AT_ONCE) {
            let start = Arc::new(Barrier::new(2 * some.len()));
            let mut renewals = Vec::new();
            for (_, both, one) in some {
                let (both, one) = (Arc::clone(both), Arc::clone(one));
                renewals.push(beside(&start, async move { one.renew().await }));
                renewals.push(beside(&start, async move { both.renew().await }));
            }
            for renewal in renewals {
                renewal.await.unwrap().unwrap();
            }
            for (name, both, _) in some {
                let left = conn.run(format!("PTTL {name}")).int();
                let left = Duration::from_millis(left.unsigned_abs());
                assert!(both.valid_for() <= left, "{:?}, {left:?}", both.valid_for());
            }
        }
    }
}

/// As in a leader election: callers that call again whatever the answer was. After the shutdown
/// each call is refused at once, and without a rest they would keep its thread for themselves.
#[tokio::test]
async fn a_shutdown_ends_beside_callers_that_call_again_and_again() {
    let server = Server::start();
    let client = client(&server).await;
    let stop = Arc::new(AtomicBool::new(false));
    let calls = Arc::new(AtomicU64::new(0));
    for number in 0..4 {
        let lock = client.lock(format!("k{number}"));
        let (stop, calls) = (Arc::clone(&stop), Arc::clone(&calls));
        tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                drop(lock.lock().await);
                calls.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    while calls.load(Ordering::SeqCst) < 100 {
        sleep(MS).await;
    }
    // Its thread may be blocked for ever, and tokio's clock with it.
    let (over, watched) = (Arc::clone(&stop), Arc::new(AtomicBool::new(false)));
    let was_late = Arc::clone(&watched);
    let watch = std::thread::spawn(move || {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) && !over.load(Ordering::SeqCst) {
            std::thread::sleep(10 * MS);
        }
        was_late.store(!over.swap(true, Ordering::SeqCst), Ordering::SeqCst);
    });
    client.shutdown().await;
    stop.store(true, Ordering::SeqCst);
    watch.join().unwrap();
    assert!(
        !watched.load(Ordering::SeqCst),
        "the callers had to stop before"
    );
}

/// Guards are given back while the client hears that their locks are gone. Each is told so, by the
/// word of the loss or by the answer to its release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_that_is_given_back_as_its_loss_is_heard_tells_of_it() {
    let server = Server::start();
    let client = client(&server).await;
    let mut conn = server.connect();
    for round in 0..20 {
        let mut guards = Vec::new();
        for number in 0..500 {
            let lock = client.lock(format!("k{round}:{number}"));
            guards.push(lock.lock().await.unwrap());
        }
        let start = Arc::new(Barrier::new(2));
        let unlocks = beside(&start, async move {
            let mut unlocked = Vec::new();
            for guard in guards {
                unlocked.push(guard.unlock().await);
            }
            unlocked
        });
        conn.run("FLUSHALL");
        start.wait();
        for unlocked in unlocks.await.unwrap() {
            assert!(
                unlocked.is_err_and(|error| error.is_lost()),
                "round {round}"
            );
        }
    }
}
