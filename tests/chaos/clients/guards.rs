//! An application with the client crate: tasks that share a client, take guards and look at them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rlock_client::{Client, Error, Guard, PermitsGuard};
use rlock_tests::Sentinels;
use tokio::time::{sleep, timeout};

use super::commands::permits;
use super::{Life, sure, told};
use crate::history::{LIMIT, now};
use crate::random::Random;

const TASKS: usize = 6;

/// Of the locks that the watchdog renews.
const LEASE: Duration = Duration::from_secs(1);

/// A kept lock that nobody uses goes back after so long.
const IDLE: Duration = Duration::from_millis(300);

/// A guard that hears nothing says so within it: the checkers count on that.
const GRACE: Duration = Duration::from_secs(1);

pub(super) fn run(life: &Arc<Life>, random: &mut Random) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let client = connect(life).await;
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let (life, client) = (Arc::clone(life), client.clone());
                let random = random.split();
                tokio::spawn(task(life, client, random))
            })
            .collect();
        for task in tasks {
            task.await.expect("a task of ours does not panic");
        }
        // The server may be gone for good.
        let _ = timeout(LEASE, client.shutdown()).await;
    });
}

async fn connect(life: &Life) -> Client {
    let url = if life.sentinels.is_empty() {
        format!("redis://{}", life.address)
    } else {
        format!("redis://{}", Sentinels::SERVICE)
    };
    let sentinels = life.sentinels.iter();
    let sentinels: Vec<_> = sentinels.map(|at| format!("redis://{at}")).collect();
    loop {
        let builder = Client::builder()
            .lease(LEASE)
            .grace(GRACE)
            .response_timeout(Duration::from_secs(1));
        let builder = if sentinels.is_empty() {
            builder
        } else {
            builder.sentinels(&sentinels)
        };
        match builder.connect(&url).await {
            Ok(client) => return client,
            Err(_) => sleep(Duration::from_millis(30)).await,
        }
    }
}

async fn task(life: Arc<Life>, client: Client, mut random: Random) {
    while life.goes_on() {
        let names = [&life.locks[..3], &life.locks[5..8]].concat();
        let name = *random.pick(&names);
        let lease = random
            .percent(30)
            .then(|| Duration::from_millis(random.within(300, 1500)));
        if random.percent(20) {
            let name = *random.pick(&life.locks[8..]);
            if let Some(guard) = acquire(&life, &client, &mut random, name, lease).await {
                let permits = guard.permits();
                look_at(&mut random, name, &guard).await;
                give_back(
                    &life,
                    &mut random,
                    name,
                    guard,
                    &format!("permits:{permits}"),
                )
                .await;
            }
        } else {
            let keeps = random.percent(40);
            let guard = lock(&life, &client, &mut random, name, lease, keeps).await;
            if let Some(guard) = guard {
                hold(&life, &client, &mut random, name, guard, keeps).await;
            }
        }
        sleep(Duration::from_millis(random.within(1, 20))).await;
    }
}

async fn lock(
    life: &Life,
    client: &Client,
    random: &mut Random,
    name: &str,
    lease: Option<Duration>,
    keeps: bool,
) -> Option<Guard> {
    let lock = client.lock(name);
    let lock = if keeps { lock.keep(IDLE) } else { lock };
    let lock = match lease {
        Some(lease) => lock.lease(lease),
        None => lock,
    };
    let lease = lease.unwrap_or(LEASE).as_millis();
    let id = life.ask(format!("? {name} plain session acquire {lease} guard"));
    let patience = Duration::from_millis(random.within(1, 1500));
    let result = match random.within(0, 4) {
        0 => lock.try_lock().await,
        // Dropped while it waits: nothing is told, and nothing may stay behind.
        1 => timeout(patience, lock.lock()).await.ok()?,
        _ => lock.lock_timeout(patience).await,
    };
    let is_handed_on = |guard: &Guard| keeps && !TOKENS.lock().unwrap().insert(guard.token());
    if let Some(guard) = result.as_ref().ok().filter(|guard| is_handed_on(guard)) {
        // That request is not the one that was granted to this process, which keeps the lock. Only
        // the guard knows how long that lasts.
        let id = life.ask(format!("? {name} plain session acquire 0 guard"));
        say_granted(&id, 1, guard);
        return result.ok();
    }
    granted(&id, 1, result)
}

/// Of the kept locks that this process was granted.
static TOKENS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Writes down the outcome of a call.
fn granted<M>(id: &str, count: u32, result: Result<Guard<M>, Error>) -> Option<Guard<M>> {
    match result {
        Ok(guard) => {
            say_granted(id, count, &guard);
            Some(guard)
        }
        Err(error) => {
            if error.is_not_acquired() {
                told(id, "refused");
            }
            None
        }
    }
}

fn say_granted<M>(id: &str, count: u32, guard: &Guard<M>) {
    let (token, owner) = (guard.token(), guard.owner());
    told(id, format!("held {count} {token} {owner}"));
}

async fn acquire(
    life: &Life,
    client: &Client,
    random: &mut Random,
    name: &str,
    lease: Option<Duration>,
) -> Option<PermitsGuard> {
    let semaphore = client.semaphore(name, LIMIT);
    let semaphore = match lease {
        Some(lease) => semaphore.lease(lease),
        None => semaphore,
    };
    let lease = lease.unwrap_or(LEASE).as_millis();
    let count = permits(random);
    let id = life.ask(format!(
        "? {name} permits:{count} session acquire {lease} guard"
    ));
    let patience = Duration::from_millis(random.within(1, 1500));
    let result = match random.within(0, 4) {
        0 => semaphore.try_acquire_many(count).await,
        1 => timeout(patience, semaphore.acquire_many(count))
            .await
            .ok()?,
        _ => semaphore.acquire_many_timeout(count, patience).await,
    };
    granted(&id, count, result)
}

/// Looks at the guard again and again, and gives the lock back in one way or another.
///
/// Of a kept lock nothing is told when it is given back: the server may have it then, or this
/// process still. Its next guard here says so by its token.
async fn hold(
    life: &Life,
    client: &Client,
    random: &mut Random,
    name: &str,
    guard: Guard,
    is_kept: bool,
) {
    let inner = if !is_kept && random.percent(20) {
        enter_again(life, client, name, &guard).await
    } else {
        None
    };
    look_at(random, name, &guard).await;
    let last = match inner {
        Some(inner) => {
            drop(guard);
            is_sure(name, &inner);
            inner
        }
        None => guard,
    };
    if is_kept {
        life.ask(format!("{} {name} plain session release", last.owner()));
        drop(last);
    } else {
        give_back(life, random, name, last, "plain").await;
    }
}

/// Looks at a guard again and again while it says "held", and renews it now and then.
async fn look_at<M>(random: &mut Random, name: &str, guard: &Guard<M>) {
    // A few stay for long, so that what happens to processes and networks happens to holders.
    let looks = if random.percent(8) {
        random.within(100, 400)
    } else {
        random.within(1, 8)
    };
    for _ in 0..looks {
        if !is_sure(name, guard) {
            break;
        }
        if random.percent(3) {
            // Renewed or not: what counts is what the guard says afterwards.
            let _ = guard.renew().await;
        }
        sleep(Duration::from_millis(random.within(1, 10))).await;
    }
}

async fn give_back<M>(life: &Life, random: &mut Random, name: &str, last: Guard<M>, mode: &str) {
    let id = life.ask(format!("{} {name} {mode} session release", last.owner()));
    if random.percent(70) {
        if last.unlock().await.is_ok() {
            told(&id, "left 0");
        }
    } else {
        drop(last);
    }
}

/// The same owner's second guard. If the first was lost meanwhile, it is of a hold of its own.
async fn enter_again(life: &Life, client: &Client, name: &str, guard: &Guard) -> Option<Guard> {
    let lease = LEASE.as_millis();
    let id = life.ask(format!(
        "{} {name} plain session acquire {lease} guard",
        guard.owner()
    ));
    let inner = client
        .lock(name)
        .owner(guard.owner())
        .try_lock()
        .await
        .ok()?;
    if inner.token() != guard.token() {
        told(&id, format!("held 1 {}", inner.token()));
    }
    Some(inner)
}

/// Writes down that the guard said so, at a time before it did.
fn is_sure<M>(name: &str, guard: &Guard<M>) -> bool {
    let at = now();
    let is_sure = !guard.is_lost();
    if is_sure {
        sure(at, name, guard.owner(), guard.token());
    }
    is_sure
}
