//! A network between a client and a server, which can be cut.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Passes bytes between its clients and a server.
///
/// A direction that is cut delivers nothing and breaks nothing, as a cable that is pulled: neither
/// side hears of it. Healed, it delivers the bytes that were sent meanwhile.
///
/// Its threads end with the connections; when the proxy goes, it closes them.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    server: Mutex<SocketAddr>,
    /// How long it takes to pass a piece on, in microseconds.
    delay: AtomicU64,
    /// The next piece for a client is its connection's last, and comes by half.
    half: AtomicBool,
    cut_to_server: AtomicBool,
    cut_to_client: AtomicBool,
    /// How often all connections were severed.
    severed: AtomicUsize,
    over: AtomicBool,
}

/// How often a thread looks whether something has changed.
const LOOK: Duration = Duration::from_millis(2);

impl Proxy {
    /// A proxy in front of the server at this address.
    pub fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            server: Mutex::new(server),
            delay: AtomicU64::new(0),
            half: AtomicBool::new(false),
            cut_to_server: AtomicBool::new(false),
            cut_to_client: AtomicBool::new(false),
            severed: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || accept(&listener, &shared));
        Self { address, state }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Nothing more reaches the server.
    pub fn cut_to_server(&self) {
        self.state.cut_to_server.store(true, Ordering::SeqCst);
    }

    /// Nothing more reaches the clients.
    pub fn cut_to_client(&self) {
        self.state.cut_to_client.store(true, Ordering::SeqCst);
    }

    /// Closes the present connections; undelivered bytes are lost.
    pub fn sever(&self) {
        self.state.severed.fetch_add(1, Ordering::SeqCst);
    }

    /// Each piece takes this much longer, in both directions.
    pub fn delay(&self, by: Duration) {
        let us = u64::try_from(by.as_micros()).expect("a moment");
        self.state.delay.store(us, Ordering::SeqCst);
    }

    /// The next piece that a client is sent breaks off in the middle, and its connection with it.
    pub fn break_off_the_next_reply(&self) {
        self.state.half.store(true, Ordering::SeqCst);
    }

    /// Connects to another server from now on. The connections there are stay.
    pub fn lead_to(&self, server: SocketAddr) {
        *self.state.server.lock().expect("an address") = server;
    }

    /// Connects to another server from now on, and closes the connections there are.
    pub fn redirect(&self, server: SocketAddr) {
        self.lead_to(server);
        self.sever();
    }

    /// Both directions deliver again, at once and in whole.
    pub fn heal(&self) {
        self.state.delay.store(0, Ordering::SeqCst);
        self.state.half.store(false, Ordering::SeqCst);
        self.state.cut_to_server.store(false, Ordering::SeqCst);
        self.state.cut_to_client.store(false, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for client in listener.incoming() {
        if state.over.load(Ordering::SeqCst) {
            return;
        }
        // Read before the address is: who connects while it changes is severed.
        let born = state.severed.load(Ordering::SeqCst);
        let server = *state.server.lock().expect("an address");
        // A server that is down is seen by the client as a connection that closes at once.
        let (Ok(client), Ok(server)) = (client, TcpStream::connect(server)) else {
            continue;
        };
        for stream in [&client, &server] {
            stream.set_nodelay(true).expect("a socket");
            stream.set_read_timeout(Some(LOOK)).expect("a socket");
        }
        let back = (server.try_clone(), client.try_clone());
        let forth_state = Arc::clone(state);
        thread::spawn(move || pass(client, server, &forth_state, Direction::ToServer, born));
        let (Ok(from), Ok(to)) = back else { continue };
        let back_state = Arc::clone(state);
        thread::spawn(move || pass(from, to, &back_state, Direction::ToClient, born));
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    ToServer,
    ToClient,
}

/// Passes one direction of one connection until it closes, or all are severed once more.
fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    state: &State,
    direction: Direction,
    severed_before: usize,
) {
    let severed = || state.severed.load(Ordering::SeqCst) != severed_before;
    let is_over = || state.over.load(Ordering::SeqCst) || severed();
    let is_cut = || match direction {
        Direction::ToServer => state.cut_to_server.load(Ordering::SeqCst),
        Direction::ToClient => state.cut_to_client.load(Ordering::SeqCst),
    };
    let mut bytes = [0; 16 * 1024];
    while !is_over() {
        let count = match from.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => 0,
        };
        let delay = state.delay.load(Ordering::SeqCst);
        if delay > 0 {
            thread::sleep(Duration::from_micros(delay));
        }
        while is_cut() && !is_over() {
            thread::sleep(LOOK);
        }
        if count == 0 || is_over() {
            break;
        }
        let half = direction == Direction::ToClient && state.half.swap(false, Ordering::SeqCst);
        let count = if half { count / 2 } else { count };
        if to.write_all(&bytes[..count]).is_err() || half {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
