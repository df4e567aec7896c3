//! The router of a cluster: it reads the map when a connection is opened or a lock is not where it
//! was.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{sleep, timeout};

use crate::chance::random;
use crate::error::Code;
use crate::topology::map::Map;
use crate::topology::{Node, Route, Router, slot_of};
use crate::wire::{Cluster, Connector, Id, NAMELESS};
use crate::{Backoff, Error, locked};

impl Router {
    /// Waits until a node is connected to, or none can be.
    pub(super) async fn cluster_tried(&self) -> Result<(), Error> {
        loop {
            self.refresh().await?;
            let ids = locked(&self.map).serving();
            let (mut tried, mut is_retired) = (Err(Error::no_cluster()), false);
            for id in ids {
                let node = self.node(&mut locked(&self.map), &id);
                tried = node.session.tried().await;
                if tried.as_ref().err().is_none_or(Error::is_final) {
                    return tried;
                }
                is_retired |= node.session.is_retired();
            }
            // Another has taken its place meanwhile.
            if !is_retired {
                return tried;
            }
            sleep(PAUSE).await;
        }
    }

    /// The node that serves the name, or any node if none is known: that node redirects the
    /// command.
    pub(super) fn home_in_cluster(&self, name: &[u8]) -> Arc<Node> {
        let mut map = locked(&self.map);
        let home = map.node_of(slot_of(name));
        let id = home.or_else(|| map.nodes.keys().next()).cloned();
        self.node(&mut map, &id.unwrap_or_else(|| Id::from("")))
    }

    fn node(&self, map: &mut Map, id: &Id) -> Arc<Node> {
        let Map {
            nodes, addresses, ..
        } = map;
        let start = || {
            let address = addresses.get(id).and_then(|known| known.first());
            let connector = address.map(|address| self.first.other(address));
            let connector = connector.unwrap_or_else(|| self.first.clone());
            let told = Some(Arc::clone(id)).filter(|id| !id.is_empty());
            Node::start(connector, told, &self.identity)
        };
        Arc::clone(nodes.entry(Arc::clone(id)).or_insert_with(start))
    }

    /// Where a redirect leads, if that node is known.
    pub(super) fn follow(&self, error: &Error) -> Option<Route> {
        let (host, port) = error.redirect()?;
        let asking = error.code == Code::Ask;
        let mut map = locked(&self.map);
        let id = map.at(host.filter(|host| *host != NAMELESS), port)?;
        let node = self.node(&mut map, &id);
        Some(Route { node, asking })
    }

    /// Reads the map: see [`Map::learn`].
    async fn refresh(&self) -> Result<Option<BTreeSet<u16>>, Error> {
        let told = self.ask_around().await?;
        Ok(locked(&self.map).learn(told))
    }

    /// Asks one node after the other; a slow answer does not hold up the question to the next.
    async fn ask_around(&self) -> Result<Cluster, Error> {
        let mut whom = self.whom_to_ask().into_iter();
        let mut asked = FuturesUnordered::new();
        let mut last = Error::no_cluster();
        loop {
            asked.extend(whom.next().map(|one| async move { one.cluster().await }));
            match timeout(HEDGE, asked.next()).await {
                Ok(Some(Ok(answer))) => return Ok(answer),
                Ok(Some(Err(error))) => last = error,
                Ok(None) => return Err(last),
                Err(_) => {}
            }
        }
    }

    fn whom_to_ask(&self) -> Vec<Connector> {
        let map = locked(&self.map);
        // One that serves nothing may be of no cluster any more, or of another.
        let serving = map.serving();
        let serving = serving.iter().filter_map(|id| map.addresses.get(id));
        let firsts = serving.filter_map(|known| known.first());
        let mut whom: Vec<_> = firsts.map(|known| self.first.other(known)).collect();
        // One node does not get all questions.
        whom.sort_by_cached_key(|_| random());
        whom.extend(std::iter::once(&self.first).chain(&self.seeds).cloned());
        whom
    }

    /// Reads the map whenever that was requested, until it is aborted, with the client. Requests
    /// that change nothing, as while a node is down until it is replaced, are served ever more
    /// slowly.
    pub(crate) async fn keep_fresh(&self) {
        let mut backoff = Backoff::new();
        loop {
            self.stale.notified().await;
            let read = self.refresh().await;
            if read.is_err() {
                self.request_refresh();
            }
            if let Ok(Some(moved)) = read
                && let Some(client) = self.identity.listener.upgrade()
            {
                backoff = Backoff::new();
                client.moved(&moved);
            }
            sleep(PAUSE.max(backoff.next())).await;
        }
    }
}

/// When a node has not answered for this long, the next one is asked too.
const HEDGE: Duration = Duration::from_millis(200);

/// From the end of one question to the next at least.
const PAUSE: Duration = Duration::from_millis(100);
