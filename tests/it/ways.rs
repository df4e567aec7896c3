//! Clients whose session connection goes through another proxy than their command connection.

use std::net::SocketAddr;

use rlock_client::{Client, ClientBuilder};
use rlock_tests::{Proxy, Server, until};

use super::client::{MS, calls};
use super::client_faults::{kill_session_connection, session_connection};

/// A client whose commands go through the first proxy and whose session goes through the second.
/// Connections that it opens later go through both.
pub(super) async fn two_ways(server: &Server, builder: ClientBuilder) -> (Client, Proxy, Proxy) {
    let (near, far) = (Proxy::to(server.address()), Proxy::to(server.address()));
    let url = format!("redis://{}", near.address());
    let client = builder.connect(&url).await.unwrap();
    part(server, &near, &far, server.address());
    (client, near, far)
}

/// A client whose commands go through the second proxy and whose session goes through the third;
/// the first leads new connections to where it is told.
pub(super) async fn three_ways(server: &Server, builder: ClientBuilder) -> (Client, [Proxy; 3]) {
    let [near, commands, session] = [(); 3].map(|()| Proxy::to(server.address()));
    near.lead_to(commands.address());
    let url = format!("redis://{}", near.address());
    let client = builder.connect(&url).await.unwrap();
    part(server, &near, &session, commands.address());
    (client, [near, commands, session])
}

/// The session connects anew, through `session`. Nothing is held, so the session begins another
/// life, and the client opens another command connection too, which goes to `commands`.
fn part(server: &Server, near: &Proxy, session: &Proxy, commands: SocketAddr) {
    let (before, bound) = (session_connection(server).unwrap(), calls(server, "bind"));
    near.lead_to(session.address());
    // The answer to the first call takes longer than it takes to see that call here.
    session.delay(75 * MS);
    kill_session_connection(server);
    until("the session has another connection", || {
        session_connection(server).is_some_and(|id| id != before)
    });
    near.lead_to(commands);
    session.heal();
    until("the commands have another connection", || {
        calls(server, "bind") > bound
    });
    near.lead_to(session.address());
}
