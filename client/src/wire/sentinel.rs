//! Asking sentinels where the primary of a service is, each on a connection that lasts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join;
use futures_util::stream::{FuturesUnordered, StreamExt};
use redis::{ConnectionInfo, PushInfo, PushKind, from_redis_value};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use crate::wire::reply::{read, read_by};
use crate::wire::{Address, Dialer, Socket};
use crate::{Error, TIMEOUT_MAX, locked, part, task};

/// The sentinels of a service. Clones of a client share them.
#[derive(Debug)]
pub(crate) struct Sentinels {
    pub(super) all: Vec<Sentinel>,
    dialer: Dialer,
    service: Arc<str>,
    /// Tells that one of them has announced another primary.
    pub(super) switched: Arc<Notify>,
    /// The address that a majority of them named last, as long as it can be used.
    agreed: Mutex<Option<Address>>,
}

/// A sentinel, and the connection on which it answered last.
#[derive(Clone, Debug)]
pub(super) struct Sentinel {
    pub(super) server: ConnectionInfo,
    open: Arc<Mutex<Option<Socket>>>,
}

impl Sentinels {
    pub(super) fn new(servers: Vec<ConnectionInfo>, service: &str, dialer: &Dialer) -> Self {
        let one = |server| Sentinel {
            server,
            open: Arc::default(),
        };
        Self {
            all: servers.into_iter().map(one).collect(),
            dialer: dialer.clone(),
            service: service.into(),
            switched: Arc::default(),
            agreed: Mutex::default(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
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
    ) -> Result<(Address, bool), Error> {
        let before = locked(&self.agreed).clone();
        // In tasks of their own: a slow one keeps its connection although nobody waits for it.
        let named = |one: &Sentinel| Arc::clone(self).named(one.clone(), within);
        let asked = self.all.iter().map(|one| tokio::spawn(task(named(one))));
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

    /// The primary that this one names.
    async fn named(self: Arc<Self>, one: Sentinel, within: Duration) -> Result<Address, Error> {
        let answer = timeout(within, self.ask(&one, within)).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::too_slow(within)));
        answer.map_err(|error| error.of(&format!("sentinel {}", one.server.addr())))
    }

    async fn ask(&self, one: &Sentinel, within: Duration) -> Result<Address, Error> {
        let mut question = redis::cmd("SENTINEL");
        question.arg(("GET-MASTER-ADDR-BY-NAME", &*self.service));
        let open = locked(&one.open).clone();
        let mut answer = Err(Error::not_attached());
        if let Some(open) = open {
            // Half of the time is left for a new connection, if this one has gone silent.
            answer = open.ask(question.clone(), part(within, 2)).await;
        }
        if answer.is_err() {
            *locked(&one.open) = None;
            let (switched, service) = (Arc::clone(&self.switched), Arc::clone(&self.service));
            let hears = move |push: PushInfo| {
                if is_switch(push, &service) {
                    switched.notify_one();
                }
            };
            let open = self.dialer.open(&one.server, hears).await?;
            let subscribe = redis::cmd("SUBSCRIBE").arg(SWITCHES).take();
            // Its user may not be allowed to.
            let subscribe = open.clone().ask(subscribe, within);
            let (_, told) = join(subscribe, open.clone().ask(question, within)).await;
            *locked(&one.open) = told.is_ok().then_some(open);
            answer = told;
        }
        let address = read_by(answer, read::<Option<(String, u16)>>)?;
        let unknown = || Error::refused(format!("it knows no service called {}", self.service));
        let (host, port) = address.ok_or_else(unknown)?;
        let host = host.into();
        Ok(Address { host, port })
    }
}

/// The address to use without a majority, given the number of sentinels that named each.
fn best(votes: &BTreeMap<Address, usize>, before: Option<&Address>) -> Option<Address> {
    let again = before.filter(|before| votes.contains_key(*before));
    let most = votes.iter().max_by_key(|(_, count)| **count);
    again.or(most.map(|(address, _)| address)).cloned()
}

/// Whether it is a message `<service> <old host> <port> <new host> <port>` about this service.
fn is_switch(push: PushInfo, service: &str) -> bool {
    let text = push.data.into_iter().next_back();
    let text = text.and_then(|text| from_redis_value::<String>(text).ok());
    let name = text.as_deref().and_then(|text| text.split(' ').next());
    push.kind == PushKind::Message && name == Some(service)
}

/// The channel on which sentinels announce new primaries.
const SWITCHES: &str = "+switch-master";

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;
    use crate::wire::dial::tests::serve;
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
                sentinels.push(read(&format!("redis://{address}"), 1).expect("a URL"));
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
            let sentinels = Arc::new(Sentinels::new(sentinels, "orders", &dialer));
            sentinels.primary(within, soon).await
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
    fn a_switch_names_the_service() {
        let push = |kind, text: &str| PushInfo {
            kind,
            data: [SWITCHES, text]
                .map(|text| Value::BulkString(text.as_bytes().to_vec()))
                .into(),
        };
        let switch = "orders 10.0.0.1 6379 ::2 6380";
        assert!(is_switch(push(PushKind::Message, switch), "orders"));
        assert!(!is_switch(push(PushKind::Message, switch), "order"));
        assert!(!is_switch(push(PushKind::Message, ""), "orders"));
        assert!(!is_switch(push(PushKind::Subscribe, switch), "orders"));
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let told = |answer| crate::wire::reply::read::<Option<(String, u16)>>(&answer);
        let both = Value::Array(vec![text("::1"), text("6379")]);
        assert_eq!(told(both), Some(Some(("::1".to_owned(), 6379))));
        assert_eq!(told(Value::Nil), Some(None));
        for answer in [
            Value::Array(vec![text("::1")]),
            Value::Array(vec![text("::1"), text("70000")]),
            text("::1"),
        ] {
            assert_eq!(told(answer), None);
        }
    }
}
