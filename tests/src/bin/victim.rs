//! A process to be killed: runs the commands that it is given on one connection, and waits.
//!
//! `victim ADDRESS COMMAND...`

#![allow(
    clippy::expect_used,
    reason = "a process of the tests; its failure is the test's"
)]

use rlock_tests::Conn;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().expect("the server's address");
    let mut conn = Conn::open(address.parse().expect("an address")).expect("a server");
    // Nobody waits for the replies: the last command may be one that has none.
    arguments.for_each(|command| conn.send(command));
    loop {
        std::thread::park();
    }
}
