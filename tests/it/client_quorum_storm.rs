//! The quorum lock of the client crate while servers stop, die and are cut off at random.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rlock_client::{Client, QuorumClient, QuorumGuard};
use rlock_tests::{Proxy, Random, Server, until};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::client::{MS, soon};

fn millis(random: &mut Random, from: u64, to: u64) -> Duration {
    Duration::from_millis(from + random.below(to - from))
}

/// How long a server may be silent. One that dies stays away for longer: it forgets its holds.
const GRACE: Duration = Duration::from_millis(600);

/// Does something to one of these servers after the other until it is over, and mends it again.
fn torment(servers: &mut [Server], ways: &[Proxy], mut random: Random, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let i = usize::try_from(random.below(servers.len() as u64)).expect("a few");
        let (server, way) = (&mut servers[i], &ways[i]);
        match random.below(6) {
            0 => {
                server.kill();
                thread::sleep(GRACE + millis(&mut random, 100, 400));
                server.restart();
            }
            1 => {
                way.sever();
                thread::sleep(millis(&mut random, 1, 100));
            }
            2 => {
                way.cut_to_server();
                thread::sleep(millis(&mut random, 50, 900));
                way.heal();
            }
            3 => {
                way.cut_to_client();
                thread::sleep(millis(&mut random, 50, 900));
                way.heal();
            }
            _ => {
                server.freeze();
                thread::sleep(millis(&mut random, 50, 900));
                server.thaw();
            }
        }
        thread::sleep(millis(&mut random, 1, 300));
    }
}

/// The guards that were not given back.
struct Held {
    /// Replays the faults.
    seed: u64,
    guards: Mutex<HashMap<u64, QuorumGuard>>,
    next: AtomicU64,
}

impl Held {
    fn new(seed: u64) -> Self {
        Self {
            seed,
            guards: Mutex::default(),
            next: AtomicU64::new(0),
        }
    }

    /// Adds a guard, and sees that no two say "held".
    fn add(&self, guard: QuorumGuard) -> u64 {
        let mut guards = self.guards.lock().unwrap();
        // Asked first: if they are held now, and the new one is held later, it was beside them.
        let others: Vec<_> = guards.values().filter(|other| !other.is_lost()).collect();
        assert!(
            guard.is_lost() || others.is_empty(),
            "{guard:?} beside {others:?}, seed {}",
            self.seed
        );
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        guards.insert(number, guard);
        number
    }

    fn take(&self, number: u64) -> QuorumGuard {
        let guard = self.guards.lock().unwrap().remove(&number);
        guard.expect("a guard that was added")
    }
}

/// Takes the lock again and again, holds it for a moment or for longer than it lasts, and gives it
/// back in one way or another.
async fn use_it(client: QuorumClient, held: Arc<Held>, mut random: Random, over: Arc<AtomicBool>) {
    while !over.load(Ordering::Relaxed) {
        let mut lock = client.lock("k");
        if random.below(2) == 0 {
            lock = lock.lease(millis(&mut random, 300, 900));
        }
        let Ok(guard) = lock.lock_timeout(millis(&mut random, 0, 2_000)).await else {
            continue;
        };
        let number = held.add(guard);
        match random.below(8) {
            0 => sleep(millis(&mut random, 500, 1_500)).await,
            _ => sleep(millis(&mut random, 0, 30)).await,
        }
        let guard = held.take(number);
        match random.below(3) {
            0 => drop(guard),
            1 => {
                // A client that has lost it may still be renewing it.
                let _ = guard.renew().await;
                let number = held.add(guard);
                sleep(millis(&mut random, 0, 30)).await;
                drop(held.take(number));
            }
            _ => drop(guard.unlock().await),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_guards_never_say_held_whatever_fails() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = u64::try_from(now.as_micros()).unwrap();
    let mut random = Random::new(seed);
    let mut servers: Vec<_> = (0..5).map(|_| Server::start()).collect();
    let ways: Vec<_> = servers
        .iter()
        .map(|server| Proxy::to(server.address()))
        .collect();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let each = Client::builder()
            .grace(GRACE)
            .lease(Duration::from_secs(3))
            .response_timeout(500 * MS);
        let builder = QuorumClient::builder()
            .server_timeout(200 * MS)
            .settings(each);
        let urls = ways.iter().map(|way| format!("redis://{}", way.address()));
        let urls: Vec<_> = urls.collect();
        // A busy machine may be too slow for such settings.
        let client = async {
            loop {
                if let Ok(client) = builder.clone().connect(&urls).await {
                    return client;
                }
            }
        };
        clients.push(soon(client).await);
    }
    let (held, over) = (Arc::new(Held::new(seed)), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for client in clients.iter().chain(&clients) {
        let random = Random::new(random.below(u64::MAX));
        let (held, over) = (Arc::clone(&held), Arc::clone(&over));
        tasks.push(tokio::spawn(use_it(client.clone(), held, random, over)));
    }
    tokio::task::block_in_place(|| {
        thread::scope(|threads| {
            // Up to three at once, so now and then too many.
            for (some, ways) in servers.chunks_mut(2).zip(ways.chunks(2)) {
                let random = Random::new(random.below(u64::MAX));
                threads.spawn(|| torment(some, ways, random, &over));
            }
            let end = Instant::now() + duration();
            // A busy machine takes longer to grant a few.
            let is_over = || {
                let now = Instant::now();
                let few = held.next.load(Ordering::Relaxed) <= 5;
                now >= end && !few || now >= end + Duration::from_secs(60)
            };
            while !is_over() && !tasks.iter().any(JoinHandle::is_finished) {
                thread::sleep(2 * MS);
            }
            over.store(true, Ordering::Relaxed);
        });
    });
    for task in tasks {
        soon(task).await.unwrap();
    }
    let grants = held.next.load(Ordering::Relaxed);
    assert!(grants > 5, "{grants} grants, seed {seed}");
    let guard = soon(clients[0].lock("k").lock()).await.unwrap();
    // Told of it or not.
    drop(soon(guard.unlock()).await);
    for client in &clients {
        soon(client.shutdown()).await;
    }
    for server in &servers {
        until("nothing is left", || server.run("DBSIZE") == 0);
    }
}

/// Ten seconds, or as many as `RLOCK_STORM` says.
fn duration() -> Duration {
    let seconds = std::env::var("RLOCK_STORM").ok();
    let seconds = seconds.and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}
