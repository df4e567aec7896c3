//! The grant or the refusal of each server, and whether the grants make a majority.

use std::iter;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use crate::LostReason::{Broken, Deleted, MaxHold};
use crate::api::{Client, Guard};
use crate::locks::{Context, Hold, wanted};
use crate::quorum::{Answers, QuorumError, QuorumLock, Round, refusal, validity};
use crate::{Error, ErrorKind, TIMEOUT_MAX};

/// The lock on all servers, in the order in which they were named.
pub(crate) struct Parts {
    pub(crate) lock: QuorumLock,
    /// When the longest hold ends; `None` without a limit.
    cap: Option<Instant>,
    servers: Vec<Part>,
    lost: Option<QuorumError>,
}

/// The lock on one server.
struct Part {
    client: Client,
    /// Or why the server granted nothing, or why its grant was released. `None`: the grant was
    /// released because the other grants were too few.
    held: Result<Guard, Option<Error>>,
    /// How often it has heard that the lock is wanted there.
    heard: Arc<AtomicU64>,
    /// The token of the first grant.
    token: Option<u64>,
    /// Whether the server has yet to answer the last request.
    is_asked: bool,
}

impl Part {
    /// Why the part does not count; `None` if it does.
    fn trouble(&self) -> Option<Error> {
        match &self.held {
            Ok(guard) => guard.still_held().err(),
            Err(why_not) => why_not.clone(),
        }
    }

    fn live(&self) -> Option<&Guard> {
        self.held.as_ref().ok().filter(|guard| !guard.is_lost())
    }

    fn valid_for(&self) -> Duration {
        let held = self.held.as_ref();
        held.map_or(Duration::ZERO, Guard::valid_for)
    }

    /// Releases a hold that is lost by our clock: the server may still keep it.
    fn let_go(&mut self) {
        self.held = Err(self.trouble());
    }

    /// Whether the lock may be taken again here: not if an operator or the longest hold has ended
    /// it.
    fn is_missing(&self) -> bool {
        let Ok(held) = &self.held else { return true };
        let ended = |reason| matches!(reason, Broken | Deleted | MaxHold);
        held.lost_already().is_some_and(|reason| !ended(reason))
    }
}

impl Parts {
    /// No server has answered yet.
    pub(crate) fn new(lock: &QuorumLock, max_hold: Option<Duration>) -> Self {
        let now = Instant::now();
        let part = |client: &Client| Part {
            client: client.clone(),
            held: Err(Some(Error::too_slow(lock.core.server_timeout))),
            heard: Arc::default(),
            token: None,
            is_asked: false,
        };
        Self {
            lock: lock.clone(),
            // A limit whose end cannot be represented is shortened, so that taking it again keeps
            // the same end.
            cap: max_hold.and_then(|longest| now.checked_add(longest.min(TIMEOUT_MAX))),
            servers: lock.core.members.iter().map(part).collect(),
            lost: None,
        }
    }

    /// Asks the servers where nothing is held, unless they are being asked: one that is silent
    /// delays no other.
    pub(crate) fn ask_missing(&mut self, max_hold: Option<Duration>, round: &mut Round) {
        let parts = self.servers.iter_mut().enumerate();
        for (server, part) in parts.filter(|(_, part)| part.is_missing()) {
            part.let_go();
            // A renewal by hand may have been given up while it waited, and its answer with it.
            if std::mem::replace(&mut part.is_asked, true) && self.lock.lease.is_none() {
                continue;
            }
            let answer = self.lock.clone().take(part.client.clone(), max_hold);
            round.push(Box::pin(async move { (server, answer.await) }));
        }
    }

    /// Like [`ask_missing`](Self::ask_missing), for a lock that a majority holds. Asks no server
    /// once the lock is lost or released, although the releases may still wait for their
    /// confirmation.
    pub(crate) fn take_again(&mut self, round: &mut Round) {
        let now = Instant::now();
        let left = self.cap.map(|cap| cap.saturating_duration_since(now));
        if self.still_held().is_ok() && left != Some(Duration::ZERO) {
            self.ask_missing(left, round);
        }
    }

    /// Adds a server's answer that came later than the majority. Releases the grant at once if the
    /// lock is lost by then.
    pub(crate) fn join_late(&mut self, server: usize, answer: Result<Guard, Error>) {
        // Check this first: the late grant may complete a majority again, but there was none in
        // between, and another client may have had one.
        if self.still_held().is_ok() {
            self.join(server, answer);
        }
    }

    /// Adds a server's grant or refusal. Releases a grant that is of no use at once.
    pub(crate) fn join(&mut self, server: usize, answer: Result<Guard, Error>) {
        let answer = answer.and_then(|guard| self.only_vote(guard));
        let part = self.servers.get_mut(server);
        let Some(part) = part else { return };
        part.is_asked = false;
        match answer {
            Ok(guard) if part.live().is_none() => {
                part.token.get_or_insert(guard.token());
                part.held = Ok(guard);
                part.heard = Arc::default();
            }
            Err(error) if part.held.is_err() => part.held = Err(Some(error)),
            _ => {}
        }
    }

    /// Passes a server's grant on, unless the same server has granted one of these holds under
    /// another address. Only the grant shows which server it was: an address may lead to another
    /// server at any time, even during the request. A guard that does not count is dropped here,
    /// and so released.
    fn only_vote(&self, guard: Guard) -> Result<Guard, Error> {
        let server = |guard: &Guard| guard.hold().session().server();
        let granted_by = server(&guard);
        let by = |held: &Guard| granted_by.is_some() && server(held) == granted_by;
        let twin = self.servers.iter().find(|part| part.live().is_some_and(by));
        let Some(twin) = twin else { return Ok(guard) };
        let twin = format!(
            "the same server as {}",
            twin.client.context.router.address()
        );
        Err(Error::unavailable(twin))
    }

    /// How long it may still be called held; zero once lost.
    pub(crate) fn valid_for(&self) -> Duration {
        let left = self.servers.iter().map(Part::valid_for);
        validity(left, self.lock.core.need)
    }

    /// Whether the grants of a try make a majority.
    ///
    /// If a grant ended before the others came, another client may hold that server's lock with a
    /// larger token. So the guard must not show our token of that server.
    pub(crate) fn are_majority(&mut self) -> bool {
        let left: Vec<_> = self.servers.iter().map(Part::valid_for).collect();
        if validity(left.iter().copied(), self.lock.core.need).is_zero() {
            return false;
        }
        for (part, left) in self.servers.iter_mut().zip(left) {
            if left.is_zero() {
                part.let_go();
                part.token = None;
            }
        }
        true
    }

    /// How many guards are kept; some may have ended.
    pub(crate) fn kept(&self) -> usize {
        self.servers.iter().flat_map(|part| &part.held).count()
    }

    /// Gives back all that is held.
    pub(crate) fn give_back(&mut self) {
        for part in self.servers.iter_mut().filter(|part| part.held.is_ok()) {
            part.held = Err(None);
        }
    }

    /// Why a try did not make a majority, when all servers have answered.
    pub(crate) fn refusal(&self) -> QuorumError {
        let too_late = || {
            let detail = "too slow, its answer came when the lease had ended";
            Error::new(ErrorKind::Unknown, detail)
        };
        let answer = |part: &Part| match &part.held {
            // Enough have granted it, but too late.
            Ok(guard) => guard.is_lost().then(too_late),
            Err(why_not) => why_not.clone(),
        };
        let answers: Answers = self.servers.iter().map(answer).collect();
        let kind = refusal(&answers, self.lock.core.need);
        self.lock.core.error(kind, "granted it", answers)
    }

    /// Why the lock is lost, if it is. Once lost it stays lost, and its remaining holds are
    /// released.
    pub(crate) fn still_held(&mut self) -> Result<(), QuorumError> {
        if self.lost.is_none() && self.live().flatten().count() < self.lock.core.need {
            let core = &self.lock.core;
            self.lost = Some(core.error(ErrorKind::Lost, "still held it", self.troubles()));
            self.give_back();
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// Each server's guard, if it still counts.
    pub(crate) fn live(&self) -> impl Iterator<Item = Option<&Guard>> {
        self.servers.iter().map(Part::live)
    }

    /// Each server's hold, if it still counts. No guards: one that somebody else had a part in
    /// would not be released when the lock is lost.
    pub(crate) fn holds(&self) -> impl Iterator<Item = Option<(Arc<Context>, Arc<Hold>)>> {
        let share = |guard: &Guard| (Arc::clone(guard.context()), Arc::clone(guard.hold()));
        self.live().map(move |guard| guard.map(share))
    }

    /// Listens at each server whether the lock is wanted, except at the servers that refused to
    /// report it.
    pub(crate) fn listen(
        &self,
        refused: &Answers,
    ) -> FuturesUnordered<impl Future<Output = (usize, Result<(), Error>)> + use<>> {
        let parts = self.servers.iter().zip(self.holds()).zip(refused);
        let listening = parts
            .enumerate()
            .filter_map(|(server, ((part, held), refused))| {
                let (context, hold) = held.filter(|_| refused.is_none())?;
                let heard = Arc::clone(&part.heard);
                Some(async move { (server, wanted(&context, iter::once(&hold), &heard).await) })
            });
        listening.collect()
    }

    /// Each server's answer to a renewal, given the holds whose renewal failed.
    ///
    /// A hold that was renewed and then lost, for example to an operator, counts as lost. A server
    /// that was slower than the majority of `lock()` and grants it only now counts as renewed:
    /// otherwise one silent server of that majority would put the renewal in doubt.
    pub(crate) fn renewed(&self, failed: Vec<Option<(Arc<Hold>, Error)>>) -> Answers {
        let answer = |(part, failed): (&Part, Option<(Arc<Hold>, Error)>)| {
            let live = part.live();
            // Unless it has been granted anew.
            let failed =
                failed.filter(|(hold, _)| live.is_none_or(|guard| Arc::ptr_eq(guard.hold(), hold)));
            failed.map_or_else(|| part.trouble(), |(_, error)| Some(error))
        };
        self.servers.iter().zip(failed).map(answer).collect()
    }

    /// Each server's reason why its part does not count.
    pub(crate) fn troubles(&self) -> Answers {
        self.servers.iter().map(Part::trouble).collect()
    }

    /// The first token of each server, by its address.
    pub(crate) fn tokens(&self) -> Vec<(String, u64)> {
        let token = |part: &Part| Some((part.client.context.router.address(), part.token?));
        self.servers.iter().filter_map(token).collect()
    }

    /// Takes out all guards, for their release. The rest counts as lost, so no later grant joins.
    pub(crate) fn take(&mut self) -> Result<Vec<(usize, Guard)>, QuorumError> {
        self.still_held()?;
        let parts = self.servers.iter_mut().enumerate();
        let guards = parts.filter_map(|(server, part)| {
            let held = std::mem::replace(&mut part.held, Err(None));
            Some((server, held.ok()?))
        });
        Ok(guards.collect())
    }
}
