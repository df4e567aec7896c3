//! A client's connections in memory, one at a time: what each carries can be kept back, and what
//! the client hears of it. Servers are those of `rlock_test`, and time is paused.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rlock_client::test_util::{Dial, Dialing, Stream};
use rlock_test::Host;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex, split};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const URL: &str = "redis://locks:6379";

/// One connection of a client. Its bytes, its end included, can be kept back.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) address: String,
    pub(super) is_session: AtomicBool,
    pub(super) to_server: watch::Sender<bool>,
    pub(super) end: watch::Sender<bool>,
    pub(super) to_client: watch::Sender<bool>,
    /// The client is told that the connection has ended; the server is not.
    pub(super) told_end: watch::Sender<bool>,
    pub(super) pump: Mutex<Option<AbortHandle>>,
}

impl Wire {
    pub(super) fn close(&self) {
        self.pump.lock().unwrap().take().unwrap().abort();
    }
}

pub(super) async fn opened(gate: &watch::Sender<bool>) {
    let _ = gate.subscribe().wait_for(|open| *open).await;
}

/// All connections of a client, in the order in which they were opened.
#[derive(Clone, Debug)]
pub(super) struct Wires(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) dial: Box<dyn Dial>,
    pub(super) wires: Mutex<Vec<Arc<Wire>>>,
    pub(super) slow: Mutex<Slow>,
    /// Which server is at an address, if it is not the one of that name.
    pub(super) leads: Mutex<BTreeMap<String, String>>,
    /// A cluster's answer to `CLUSTER SLOTS`: which node serves a slot, and up to which one.
    pub(super) slots: Mutex<Vec<(u16, u16, &'static str, &'static str)>>,
    /// The ids of these, where they are servers that say who they are.
    pub(super) ids: Mutex<BTreeMap<&'static str, String>>,
    /// How often it was asked.
    pub(super) asked: AtomicUsize,
}

/// How servers answer on connections that are opened from now on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slow {
    /// So late.
    pub(super) by: Duration,
    /// And not at all from the end of the handshake on.
    pub(super) silent_after_handshake: bool,
    /// And not at all from the last answer of the handshake on.
    pub(super) silent_in_handshake: bool,
    /// The last answer of the handshake comes later still by this.
    pub(super) handshake_by: Duration,
    /// After the handshake nothing reaches the server, ever.
    pub(super) swallows_after_handshake: bool,
}

impl Wires {
    pub(super) fn of(host: &Host) -> Self {
        Self(Arc::new(Inner {
            dial: Box::new(host.dial()),
            wires: Mutex::default(),
            slow: Mutex::default(),
            leads: Mutex::default(),
            slots: Mutex::default(),
            ids: Mutex::default(),
            asked: AtomicUsize::new(0),
        }))
    }

    pub(super) fn slow(&self, slow: Slow) {
        *self.0.slow.lock().unwrap() = slow;
    }

    /// The newest that is, or is not, a session connection.
    pub(super) fn newest(&self, address: &str, is_session: bool) -> Arc<Wire> {
        let wires = self.0.wires.lock().unwrap();
        let mut wires = wires.iter().rev();
        let newest = wires.find(|wire| {
            wire.address == address && wire.is_session.load(Ordering::SeqCst) == is_session
        });
        Arc::clone(newest.unwrap())
    }

    pub(super) fn slots(&self) -> String {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let (slots, ids) = (self.0.slots.lock().unwrap(), self.0.ids.lock().unwrap());
        let mut reply = format!("*{}\r\n", slots.len());
        for (first, last, host, id) in slots.iter() {
            let text = |text: &str| format!("${}\r\n{text}\r\n", text.len());
            let id = ids.get(id).map_or(*id, String::as_str);
            let (host, id) = (text(host), text(id));
            reply += "*3\r\n";
            reply += &[":", &first.to_string(), "\r\n:", &last.to_string()].concat();
            reply += &["\r\n*4\r\n", &host, ":6379\r\n", &id, "*0\r\n"].concat();
        }
        reply
    }

    /// The node that slots name so is this server.
    pub(super) fn is(&self, id: &'static str, server: &rlock_test::Server) {
        self.0.ids.lock().unwrap().insert(id, server.run_id());
    }

    pub(super) fn lead(&self, address: &str, server: &str) {
        let mut leads = self.0.leads.lock().unwrap();
        leads.insert(address.to_owned(), server.to_owned());
    }

    pub(super) fn close_all(&self, address: &str) {
        for wire in self.0.wires.lock().unwrap().iter() {
            if wire.address == address
                && let Some(pump) = wire.pump.lock().unwrap().take()
            {
                pump.abort();
            }
        }
    }

    /// How many were opened.
    pub(super) fn count(&self) -> usize {
        self.0.wires.lock().unwrap().len()
    }

    pub(super) fn session(&self) -> Arc<Wire> {
        self.newest("locks:6379", true)
    }

    pub(super) fn commands(&self) -> Arc<Wire> {
        self.newest("locks:6379", false)
    }

    fn pass(&self, address: &str, server: Box<dyn Stream>) -> Box<dyn Stream> {
        let slow = *self.0.slow.lock().unwrap();
        let wire = Arc::new(Wire {
            address: address.to_owned(),
            is_session: AtomicBool::new(false),
            to_server: watch::Sender::new(true),
            end: watch::Sender::new(true),
            to_client: watch::Sender::new(true),
            told_end: watch::Sender::new(false),
            pump: Mutex::default(),
        });
        let (near, far) = duplex(1 << 16);
        let (mut from_client, mut to_client) = split(far);
        let (mut from_server, mut to_server) = split(server);
        let (there, back) = (Arc::clone(&wire), Arc::clone(&wire));
        let shaken = Arc::new(AtomicBool::new(false));
        let is_shaken = Arc::clone(&shaken);
        let (late, mut due) = mpsc::unbounded_channel();
        let (this, told) = (self.clone(), late.clone());
        let forth = async move {
            let mut bytes = vec![0; 1 << 16];
            loop {
                let count = from_client.read(&mut bytes).await.unwrap_or(0);
                if count == 0 {
                    opened(&there.end).await;
                    let _ = to_server.shutdown().await;
                    return;
                }
                if String::from_utf8_lossy(&bytes[..count]).contains("RLOCK.EVENTS") {
                    there.is_session.store(true, Ordering::SeqCst);
                }
                if slow.swallows_after_handshake && is_shaken.load(Ordering::SeqCst) {
                    continue;
                }
                opened(&there.to_server).await;
                if String::from_utf8_lossy(&bytes[..count]).contains("SHARDS") {
                    // All nodes serve something.
                    let _ = told.send((Instant::now() + slow.by, b"*0\r\n".to_vec()));
                    continue;
                }
                if String::from_utf8_lossy(&bytes[..count]).contains("SLOTS") {
                    let _ = told.send((Instant::now() + slow.by, this.slots().into_bytes()));
                    continue;
                }
                if to_server.write_all(&bytes[..count]).await.is_err() {
                    return;
                }
            }
        };
        let hears = async move {
            let mut bytes = vec![0; 1 << 16];
            loop {
                let count = from_server.read(&mut bytes).await.unwrap_or(0);
                let _ = late.send((Instant::now() + slow.by, bytes[..count].to_vec()));
                if count == 0 {
                    return;
                }
            }
        };
        let tells = async move {
            let telling = async {
                while let Some((at, bytes)) = due.recv().await {
                    sleep_until(at).await;
                    let is_last = String::from_utf8_lossy(&bytes).contains("proto");
                    if is_last && slow.silent_in_handshake {
                        std::future::pending::<()>().await;
                    }
                    if is_last {
                        sleep(slow.handshake_by).await;
                        shaken.store(true, Ordering::SeqCst);
                    }
                    opened(&back.to_client).await;
                    if bytes.is_empty() || to_client.write_all(&bytes).await.is_err() {
                        return;
                    }
                    if is_last && slow.silent_after_handshake {
                        std::future::pending::<()>().await;
                    }
                }
            };
            tokio::select! {
                biased;
                () = opened(&back.told_end) => {}
                () = telling => {}
            }
            let _ = to_client.shutdown().await;
        };
        let pump = tokio::spawn(async move {
            tokio::join!(forth, hears, tells);
        });
        *wire.pump.lock().unwrap() = Some(pump.abort_handle());
        self.0.wires.lock().unwrap().push(wire);
        Box::new(near)
    }
}

impl Dial for Wires {
    fn dial(&self, address: &str) -> Dialing {
        let leads = self.0.leads.lock().unwrap();
        let there = leads.get(address).map_or(address, String::as_str);
        let (this, dialing) = (self.clone(), self.0.dial.dial(there));
        let address = address.to_owned();
        Box::pin(async move { io::Result::Ok(this.pass(&address, dialing.await?)) })
    }
}

pub(super) fn cut(wire: &Wire) {
    wire.to_server.send_replace(false);
    wire.end.send_replace(false);
}

/// A name in this slot.
pub(super) fn name_in(slot: u16) -> String {
    let crc16 = |bytes: &[u8]| {
        bytes.iter().fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
                (crc << 1) ^ if crc & 0x8000 != 0 { 0x1021 } else { 0 }
            })
        })
    };
    let mut names = (0..).map(|number| format!("n{number}"));
    names
        .find(|name| crc16(name.as_bytes()) % 16_384 == slot)
        .unwrap()
}
