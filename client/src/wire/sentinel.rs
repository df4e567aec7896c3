//! Asking sentinels where the primary of a service is, each on a connection that lasts.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::{Value, from_redis_value_ref};
use tokio::time::{Instant, timeout, timeout_at};

use crate::wire::{Address, Dialer, Pushes, Socket};
use crate::{Error, TIMEOUT_MAX, locked, part, task};

/// Where the primary is, and whether more than half of all sentinels say so.
type Named = (Address, bool);

/// The sentinels of a service. Clones of a client share them.
#[derive(Debug)]
pub(crate) struct Sentinels {
    all: Vec<Sentinel>,
    service: Box<str>,
    dialer: Dialer,
    /// The address that a majority of them named last, as long as it can be used.
    agreed: Mutex<Option<Address>>,
}

/// A sentinel, and the connection on which it answered last.
struct Sentinel {
    client: redis::Client,
    open: Mutex<Option<Open>>,
}

type Open = (Socket, Pushes);

impl Sentinel {
    /// Takes the connection, if it has not been closed: it is put back with the answer. So one that
    /// does not answer is closed.
    fn take(&self) -> Option<Open> {
        let open = locked(&self.open).take();
        open.filter(|(_, pushes)| !pushes.is_closed())
    }
}

impl fmt::Debug for Sentinel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}

impl Sentinels {
    pub(super) fn new(clients: Vec<redis::Client>, service: Box<str>, dialer: &Dialer) -> Self {
        let one = |client| Sentinel {
            client,
            open: Mutex::default(),
        };
        Self {
            all: clients.into_iter().map(one).collect(),
            service,
            dialer: dialer.clone(),
            agreed: Mutex::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = &redis::Client> {
        self.all.iter().map(|one| &one.client)
    }

    /// Forgets the agreed address, because it could not be used.
    pub(super) fn forget(&self) {
        *locked(&self.agreed) = None;
    }

    /// Asks all sentinels at once, each for no longer than `within`. An address that more than half
    /// of them name is returned at once: a dead sentinel then costs no time, and one that is cut
    /// off from the others does not lead to a primary that they have replaced. Without such a
    /// majority, the answers that come within `soon` after the first address count. The address
    /// that a majority named before wins if one of them names it, so that the client does not go to
    /// and fro; otherwise the most frequent address wins. Also returns whether more than half of
    /// all sentinels named it.
    pub(super) async fn primary(
        self: &Arc<Self>,
        within: Duration,
        soon: Duration,
    ) -> Result<Named, Error> {
        let before = locked(&self.agreed).clone();
        // In tasks of their own: a slow one keeps its connection although nobody waits for it.
        let asked = (0..self.all.len()).map(|place| {
            let this = Arc::clone(self);
            tokio::spawn(task(async move { this.named_by(place, within).await }))
        });
        let mut asked = asked.collect::<FuturesUnordered<_>>();
        let (mut votes, mut errors) = (BTreeMap::new(), Vec::new());
        let after = |pause| Instant::now().checked_add(pause);
        // Each of them ends in time by itself; the first that knows something shortens the wait.
        let mut deadline = after(TIMEOUT_MAX).unwrap_or_else(Instant::now);
        while let Ok(Some(answer)) = timeout_at(deadline, asked.next()).await {
            match answer.unwrap_or_else(|_| Err(Error::shut_down())) {
                Ok(address) => {
                    deadline = after(soon).map_or(deadline, |soon| soon.min(deadline));
                    let count = votes.entry(address.clone()).or_insert(0_usize);
                    *count = count.saturating_add(1);
                    if *count > self.all.len() / 2 {
                        *locked(&self.agreed) = Some(address.clone());
                        return Ok((address, true));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        let best = best(&votes, before.as_ref()).ok_or_else(|| Error::no_sentinel(&errors))?;
        Ok((best, false))
    }

    async fn named_by(&self, place: usize, within: Duration) -> Result<Address, Error> {
        let one = self.all.get(place).ok_or_else(Error::shut_down)?;
        let answer = timeout(within, self.ask_sentinel(one, within)).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::too_slow(within)));
        let whom = one.client.get_connection_info().addr();
        answer.map_err(|error| error.of(&format!("sentinel {whom}")))
    }

    async fn ask_sentinel(&self, one: &Sentinel, within: Duration) -> Result<Address, Error> {
        let mut answer = None;
        if let Some(open) = one.take() {
            // Half of the time is left for a new connection, if this one has gone silent.
            let asking = timeout(part(within, 2), self.ask_on(one, open));
            answer = asking.await.ok().and_then(Result::ok);
        }
        let answer = if let Some(answer) = answer {
            answer
        } else {
            let open = self.dialer.open(&one.client, None).await?;
            self.ask_on(one, open).await?
        };
        let other_reply = || Error::refused("the reply is not a sentinel's");
        match answer.extract_error().map_err(Error::could_not_connect)? {
            Value::Nil => Err(Error::refused(format!(
                "it knows no service called {}",
                self.service
            ))),
            answer => read_address(&answer).ok_or_else(other_reply),
        }
    }

    /// The sentinel's answer on this connection, which is kept then.
    async fn ask_on(&self, one: &Sentinel, mut open: Open) -> Result<Value, Error> {
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&*self.service);
        let answer = open.0.redis.send_packed_command(&question).await;
        let answer = answer.map_err(Error::could_not_connect)?;
        *locked(&one.open) = Some(open);
        Ok(answer)
    }
}

/// The address to use without a majority, given the number of sentinels that named each.
fn best(votes: &BTreeMap<Address, usize>, before: Option<&Address>) -> Option<Address> {
    let again = before.filter(|before| votes.contains_key(*before));
    let most = votes.iter().max_by_key(|(_, count)| **count);
    again.or(most.map(|(address, _)| address)).cloned()
}

fn read_address(answer: &Value) -> Option<Address> {
    let (host, port): (String, u16) = from_redis_value_ref(answer).ok()?;
    let host = host.into();
    Some(Address { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::connection::tests::serve;
    use crate::wire::endpoint::read;
    use tokio::net::TcpListener;

    fn address(host: &str, port: u16) -> Address {
        let host = host.into();
        Address { host, port }
    }

    #[test]
    fn without_a_majority_it_is_what_a_majority_named_before_if_anybody_still_does() {
        let address = |port| address("host", port);
        let votes = BTreeMap::from([(address(1), 1), (address(2), 2)]);
        assert_eq!(best(&votes, None), Some(address(2)));
        assert_eq!(best(&votes, Some(&address(1))), Some(address(1)));
        assert_eq!(best(&votes, Some(&address(3))), Some(address(2)));
        assert_eq!(best(&BTreeMap::new(), Some(&address(1))), None);
    }

    #[tokio::test]
    async fn what_more_than_half_of_all_name_is_told_at_once_and_what_fewer_name_not_as_such() {
        // A sentinel that names no port never answers.
        let ask = async |ports: &[Option<u16>]| {
            let mut sentinels = Vec::new();
            for port in ports.iter().copied() {
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let address = listener.local_addr().expect("a port");
                let url = read(&format!("redis://{address}")).expect("a URL");
                sentinels.push(redis::Client::open(url).expect("an address"));
                tokio::spawn(async move {
                    let (socket, _) = listener.accept().await.expect("it connects");
                    let Some(port) = port else {
                        return std::future::pending().await;
                    };
                    let port = port.to_string();
                    let named = format!("*2\r\n$4\r\nhost\r\n${}\r\n{port}\r\n", port.len());
                    serve(socket, |_| named.clone()).await;
                });
            }
            let (within, soon) = (Duration::from_secs(60), Duration::from_secs(1));
            let dialer = Dialer::within(within);
            let sentinels = Sentinels::new(sentinels, "orders".into(), &dialer);
            Arc::new(sentinels).primary(within, soon).await
        };
        let (one, two) = (Some(1), Some(2));
        let started = Instant::now();
        let told = ask(&[None, one, two, two, two]).await.expect("an answer");
        assert_eq!(told, (address("host", 2), true));
        let told = ask(&[None, None, one, two, two]).await.expect("an answer");
        assert_eq!(told, (address("host", 2), false));
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let told = read_address(&Value::Array(vec![text("::1"), text("6379")]));
        assert_eq!(told, Some(address("::1", 6379)));
        for answer in [
            Value::Array(vec![text("::1")]),
            Value::Array(vec![text("::1"), text("70000")]),
            text("::1"),
        ] {
            assert_eq!(read_address(&answer), None);
        }
    }
}
