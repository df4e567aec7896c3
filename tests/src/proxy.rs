//! A network between a client and a server, which can be cut.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Passes bytes between those who connect to it and a server.
///
/// A direction that is cut delivers nothing and breaks nothing, as a cable that is pulled: neither
/// side hears of it. Healed, it delivers what was sent meanwhile.
///
/// Its threads end with the connections; when the proxy goes, it closes them.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
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
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || accept(&listener, server, &shared));
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

    /// Closes the connections there are; what they have not delivered is lost.
    pub fn sever(&self) {
        self.state.severed.fetch_add(1, Ordering::SeqCst);
    }

    /// Both directions deliver again.
    pub fn heal(&self) {
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

fn accept(listener: &TcpListener, server: SocketAddr, state: &Arc<State>) {
    for client in listener.incoming() {
        if state.over.load(Ordering::SeqCst) {
            return;
        }
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
        thread::spawn(move || pass(client, server, &forth_state, |state| &state.cut_to_server));
        let (Ok(from), Ok(to)) = back else { continue };
        let back_state = Arc::clone(state);
        thread::spawn(move || pass(from, to, &back_state, |state| &state.cut_to_client));
    }
}

/// Passes one direction of one connection until it closes.
fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    state: &State,
    cut: impl Fn(&State) -> &AtomicBool,
) {
    let severed = || state.severed.load(Ordering::SeqCst);
    let severed_before = severed();
    let is_over = || state.over.load(Ordering::SeqCst) || severed() != severed_before;
    let mut bytes = [0; 16 * 1024];
    while !is_over() {
        let count = match from.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => 0,
        };
        while cut(state).load(Ordering::SeqCst) && !is_over() {
            thread::sleep(LOOK);
        }
        if count == 0 || is_over() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
