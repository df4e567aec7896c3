//! Locks that are kept for their next use: what a guard gives back stays here for a while, until
//! somebody else wants it.
//!
//! A kept lock has one place: in a guard, on its way to the next waiter of this process, or idle
//! here. So the callers of a process exclude each other without the server. One of them at a time
//! asks the server, as an owner that only the kept lock uses; the others wait here.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use smallvec::smallvec;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::locks::context::Asks;
use crate::locks::held::Keeps;
use crate::locks::{Context, Held, Hold, HoldOptions, Owner, Request, Target, acquire, listen};
use crate::wire::{Mode, WaitMode};
use crate::{locked, metrics};

/// The kept locks of a client. The last handle (the client, a clone, or a lock named by it) ends
/// it, and idle locks are released.
pub(crate) struct Keeper {
    /// The largest number of idle locks.
    most: usize,
    /// The number of idle locks now.
    idle: Arc<AtomicUsize>,
    stock: Mutex<Stock>,
}

#[derive(Default)]
struct Stock {
    locks: HashMap<KeptKey, Weak<Kept>>,
    /// The idle locks, oldest first, for eviction. A lock that is taken again leaves its entry
    /// here, so the hot path does not touch this map; eviction checks whether the lock is idle
    /// still.
    idle: BTreeMap<Place, Arc<Kept>>,
    places: u64,
}

type Place = (Instant, u64);

/// Calls that ask for other terms are strangers to each other: one would have what the other asked
/// for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct KeptKey {
    pub(crate) name: Arc<[u8]>,
    pub(crate) options: HoldOptions,
    pub(crate) idle: Duration,
}

/// A lock that is kept, and those here who want it.
///
/// Its mutex is taken before that of the stock and that of the table, and no guard is dropped under
/// it, for that takes it too.
pub(crate) struct Kept {
    key: KeptKey,
    keeper: Weak<Keeper>,
    /// How many are idle of all.
    idle: Arc<AtomicUsize>,
    inside: Mutex<Inside>,
    /// A caller has got the lock from the server.
    entered: Notify,
}

#[derive(Default)]
struct Inside {
    here: Here,
    /// Waiting callers of this process, in order of arrival.
    line: VecDeque<Waiter>,
    waiters: u64,
    place: Option<Place>,
    /// When the hold is looked at again, if nothing happens before.
    next_look: Option<Instant>,
}

/// Where the lock is, as far as the callers here are concerned.
#[derive(Default)]
enum Here {
    /// Nobody here has it or asks for it.
    #[default]
    Away,
    /// One of the callers asks the server, under this owner.
    Asked(Owner),
    /// A guard has it.
    Used(Arc<Hold>),
    Idle {
        held: Held,
        since: Instant,
    },
}

struct Waiter {
    number: u64,
    /// Whether it has waited for a hold of this process. The server was there then, and an outage
    /// since does not end the wait.
    was_held_up: bool,
    turn: oneshot::Sender<Turn>,
}

/// The message to a waiting caller.
enum Turn {
    Yours(Held),
    /// It is its turn to ask the server.
    Ask(Asking),
}

impl Keeper {
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            idle: Arc::default(),
            stock: Mutex::default(),
        })
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        locked(&self.stock)
    }

    /// The lock that is kept on these terms.
    pub(crate) fn lock(self: &Arc<Self>, key: KeptKey) -> Arc<Kept> {
        let mut stock = self.stock();
        if let Some(kept) = stock.locks.get(&key).and_then(Weak::upgrade) {
            return kept;
        }
        let kept = Arc::new(Kept {
            key: key.clone(),
            keeper: Arc::downgrade(self),
            idle: Arc::clone(&self.idle),
            inside: Mutex::default(),
            entered: Notify::new(),
        });
        stock.locks.insert(key, Arc::downgrade(&kept));
        kept
    }

    /// Evicts the locks that have been idle longest, until at most `most` are idle.
    fn make_room(&self) {
        while self.idle.load(Ordering::Relaxed) > self.most {
            let oldest = self.stock().idle.pop_first();
            let Some((place, kept)) = oldest else { return };
            kept.must_leave(self, place);
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let stock = mem::take(&mut *self.stock());
        for kept in stock.idle.into_values() {
            let held = kept.take_out(&mut kept.inside());
            drop(held);
        }
    }
}

impl Stock {
    fn put(&mut self, kept: &Arc<Kept>, since: Instant) -> Place {
        self.places = self.places.saturating_add(1);
        let place = (since, self.places);
        self.idle.insert(place, Arc::clone(kept));
        place
    }
}

/// The result of looking for the lock in this process.
enum Found {
    Held(Held),
    Wait(Waiting),
    Ask(Asking),
    /// Another caller asks the server already, and this one does not wait: it asks on its own.
    AskBeside,
}

impl Kept {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        locked(&self.inside)
    }

    /// The lock, if it is here and idle. No I/O, and nothing to wait for.
    pub(crate) fn take_now(self: &Arc<Self>) -> Option<Held> {
        self.take_idle(&mut self.inside())
    }

    fn take_idle(self: &Arc<Self>, inside: &mut Inside) -> Option<Held> {
        match &inside.here {
            Here::Idle { held, .. } if is_fit(&held.hold, Instant::now()) => {}
            _ => return None,
        }
        let mut held = self.take_out(inside)?;
        inside.here = Here::Used(Arc::clone(&held.hold));
        held.hold.wanted.begins_anew();
        held.kept = Some(Arc::<Self>::clone(self));
        Some(held)
    }

    /// Takes the idle lock out, for the next guard or for a release.
    fn take_out(&self, inside: &mut Inside) -> Option<Held> {
        match mem::take(&mut inside.here) {
            Here::Idle { held, .. } => {
                self.idle.fetch_sub(1, Ordering::Relaxed);
                Some(held)
            }
            other => {
                inside.here = other;
                None
            }
        }
    }

    /// Takes the lock from this process if no other process wants it, otherwise from the server. If
    /// the future is dropped, its guard is released.
    pub(crate) async fn take(
        self: &Arc<Self>,
        context: &Arc<Context>,
        wait_mode: WaitMode,
    ) -> Result<Held, Error> {
        let asking = match self.find(context, wait_mode)? {
            Found::Held(held) => return Ok(held),
            Found::AskBeside => {
                let owner = context.owner().of_kept();
                return self.ask(context, owner, wait_mode, false).await;
            }
            Found::Ask(asking) => asking,
            Found::Wait(mut waiting) => {
                let turn = waiting.turn(context, wait_mode).await;
                // A wait that goes on at the server is measured there.
                if !matches!(turn, Ok(Turn::Ask(_))) {
                    metrics::waited(waiting.since);
                }
                match turn? {
                    Turn::Yours(held) => return Ok(held),
                    Turn::Ask(asking) => asking,
                }
            }
        };
        let (owner, was_held_up) = (asking.owner.clone(), asking.was_held_up);
        let held = self.ask(context, owner, wait_mode, was_held_up).await?;
        Ok(asking.entered(context, held))
    }

    async fn ask(
        &self,
        context: &Arc<Context>,
        owner: Owner,
        wait_mode: WaitMode,
        was_held_up: bool,
    ) -> Result<Held, Error> {
        let request = Request {
            owner,
            names: smallvec![Arc::clone(&self.key.name)],
            mode: Mode::Plain,
            options: self.key.options,
            wait_mode,
            was_held_up,
        };
        let helds = acquire::acquire(context, request).await?;
        helds.into_iter().next().ok_or_else(Error::shut_down)
    }

    fn find(self: &Arc<Self>, context: &Arc<Context>, wait_mode: WaitMode) -> Result<Found, Error> {
        let (mut inside, now) = (self.inside(), Instant::now());
        if let Some(held) = self.take_idle(&mut inside) {
            return Ok(Found::Held(held));
        }
        // Release an unfit lock before the lock is asked for: the new request must not wait for it.
        let unfit = self.take_out(&mut inside);
        if unfit.is_some() {
            drop(inside);
            drop(unfit);
            self.leaves();
            inside = self.inside();
        }
        // The guard does not know yet that it has lost it. Earlier callers go first.
        let is_lost = matches!(&inside.here, Here::Used(hold) if hold.is_over(now));
        let gone = is_lost.then(|| self.next_asks(&mut inside, context));
        let found = match &inside.here {
            Here::Used(hold) if !wait_mode.waits() => {
                hold.is_wanted_here();
                Err(not_acquired(hold, now))
            }
            // The server might let a try pass the callers that wait here.
            Here::Asked(_) if !wait_mode.waits() && inside.has_line() => {
                Err(Error::not_acquired(Some(Duration::ZERO)))
            }
            Here::Asked(_) if !wait_mode.waits() => Ok(Found::AskBeside),
            Here::Used(hold) => {
                hold.is_wanted_here();
                Ok(Found::Wait(self.wait(&mut inside)))
            }
            Here::Asked(_) => Ok(Found::Wait(self.wait(&mut inside))),
            Here::Away | Here::Idle { .. } => {
                Ok(Found::Ask(self.asks(&mut inside, context, false)))
            }
        };
        drop(inside);
        drop(gone);
        found
    }

    fn wait(self: &Arc<Self>, inside: &mut Inside) -> Waiting {
        inside.waiters = inside.waiters.saturating_add(1);
        let (turn, told) = oneshot::channel();
        let number = inside.waiters;
        let was_held_up = matches!(inside.here, Here::Used(_));
        inside.line.push_back(Waiter {
            number,
            was_held_up,
            turn,
        });
        Waiting {
            kept: Arc::clone(self),
            number,
            since: Instant::now(),
            told,
        }
    }

    /// One of the callers asks the server from now on.
    fn asks(self: &Arc<Self>, inside: &mut Inside, context: &Context, was_held_up: bool) -> Asking {
        let owner = context.owner().of_kept();
        inside.here = Here::Asked(owner.clone());
        Asking {
            kept: Arc::clone(self),
            context: context.this.clone(),
            owner,
            was_held_up,
        }
    }

    /// Lets the first waiting caller ask the server. The result is dropped after the mutex is
    /// released.
    fn next_asks(self: &Arc<Self>, inside: &mut Inside, context: &Context) -> Vec<Turn> {
        inside.here = Here::Away;
        let mut gone = Vec::new();
        while let Some(waiter) = inside.line.pop_front() {
            if waiter.turn.is_closed() {
                continue;
            }
            let asking = self.asks(inside, context, waiter.was_held_up);
            match waiter.turn.send(Turn::Ask(asking)) {
                Ok(()) => break,
                // Its end lets the next one ask.
                Err(turn) => {
                    gone.push(turn);
                    break;
                }
            }
        }
        gone
    }

    /// Others were used later, so it has lost its place. If it was used since it was put there it
    /// gets one that says so.
    fn must_leave(self: Arc<Self>, keeper: &Keeper, place: Place) {
        let mut inside = self.inside();
        if inside.place != Some(place) {
            return;
        }
        inside.place = None;
        let held = match &inside.here {
            Here::Idle { since, .. } if *since > place.0 => {
                inside.place = Some(keeper.stock().put(&self, *since));
                None
            }
            _ => self.take_out(&mut inside),
        };
        drop(inside);
        drop(held);
    }

    /// Gives its place up, unless it has something.
    fn leaves(&self) {
        let mut inside = self.inside();
        let place = match inside.here {
            Here::Used(_) | Here::Idle { .. } => None,
            Here::Away | Here::Asked(_) => inside.place.take(),
        };
        drop(inside);
        if let (Some(place), Some(keeper)) = (place, self.keeper.upgrade()) {
            let left = keeper.stock().idle.remove(&place);
            drop(left);
        }
    }

    /// When to look again at a hold that is kept. Never, if it is not any more: because it has gone
    /// back, or is now to go back, at once if it is idle and otherwise after its present use.
    fn look(self: &Arc<Self>, context: &Context, hold: &Arc<Hold>) -> Option<Instant> {
        let mut inside = self.inside();
        let now = Instant::now();
        let is_over = !may_be_kept(hold, now) || context.background.closing.is_cancelled();
        match &inside.here {
            Here::Used(used) if Arc::ptr_eq(used, hold) => {
                if context.background.closing.is_cancelled() {
                    return None;
                }
                if hold.is_over(now) {
                    let gone = self.next_asks(&mut inside, context);
                    drop(inside);
                    drop(gone);
                    return None;
                }
                inside.next_look = Some(hold.end());
            }
            Here::Idle { held, since } if Arc::ptr_eq(&held.hold, hold) => {
                let until = since.checked_add(self.key.idle).filter(|_| !is_over);
                if until.is_none_or(|until| until <= now) {
                    let idle = self.take_out(&mut inside);
                    drop(inside);
                    drop(idle);
                    self.leaves();
                    return None;
                }
                inside.next_look = until.map(|until| until.min(hold.end()));
            }
            _ => return None,
        }
        inside.next_look
    }

    /// Ends at the caller's deadline, or when the server does not answer the caller that asks, for
    /// the time that a reply may take.
    async fn late(&self, context: &Context, wait_mode: WaitMode) -> Error {
        let deadline = match wait_mode {
            WaitMode::Until(deadline) => Some(deadline),
            WaitMode::None | WaitMode::Forever => None,
        };
        let mut unanswered = None;
        loop {
            // Listens before it looks: a call that gets the lock in between is heard of.
            let mut entered = pin!(self.entered.notified());
            entered.as_mut().enable();
            let now = Instant::now();
            let is_late = deadline.is_some_and(|deadline| deadline <= now);
            let asks = match &self.inside().here {
                Here::Used(hold) if is_late => return not_acquired(hold, now),
                Here::Asked(owner) => Some(owner.clone()),
                Here::Used(_) | Here::Away | Here::Idle { .. } => None,
            };
            let before = unanswered.take();
            if let Some(owner) = asks {
                let (name, mode) = (Arc::clone(&self.key.name), Mode::Plain);
                match context.state_of(&Target {
                    name,
                    owner: owner.clone(),
                    mode,
                }) {
                    Some(Asks::Holds(hold)) if is_late => return not_acquired(&hold, now),
                    Some(Asks::IsQueued) if is_late => {
                        return Error::not_acquired(Some(Duration::ZERO));
                    }
                    Some(_) => {}
                    None if before
                        .as_ref()
                        .is_some_and(|(one, since): &(Owner, Instant)| {
                            *one == owner && since.elapsed() >= context.router.response_timeout
                        }) =>
                    {
                        let busy = "the server has not answered a call before this";
                        let trouble = context.router.trouble();
                        return trouble.unwrap_or_else(|| Error::unavailable(busy));
                    }
                    None => {
                        let since = before.filter(|(one, _)| *one == owner);
                        unanswered = Some(since.unwrap_or((owner, now)));
                    }
                }
            }
            let look = now.checked_add(context.router.response_timeout);
            let to_come = deadline.filter(|_| !is_late);
            let next = look.into_iter().chain(to_come).min().unwrap_or(now);
            tokio::select! {
                () = sleep_until(next) => {}
                () = entered => {}
            }
        }
    }
}

impl Keeps for Kept {
    fn has_line(&self) -> bool {
        self.inside().has_line()
    }

    fn put_back(self: Arc<Self>, held: &mut Held) -> bool {
        // Should it be the last handle, it ends when the mutex is free.
        let keeper = self.keeper.upgrade();
        let mut inside = self.inside();
        let since = Instant::now();
        let is_used = matches!(&inside.here, Here::Used(one) if Arc::ptr_eq(one, &held.hold));
        let is_closing = held.context.background.closing.is_cancelled();
        let stays = is_used && !is_closing && is_fit(&held.hold, since);
        let Some(keeper) = keeper.as_ref().filter(|_| stays) else {
            return false;
        };
        held.hold.wanted.begins_anew();
        let mut next = held.hand_over();
        while let Some(waiter) = inside.line.pop_front() {
            next.kept = Some(Arc::<Self>::clone(&self));
            match waiter.turn.send(Turn::Yours(next)) {
                // It comes back to us, and not to the mutex.
                Err(Turn::Yours(mut gone)) => {
                    gone.kept = None;
                    next = gone;
                }
                _ => return true,
            }
        }
        let until = since.checked_add(self.key.idle);
        if until.is_some_and(|until| inside.next_look.is_some_and(|next| until < next)) {
            inside.next_look = until;
            held.hold.changed.notify_waiters();
        }
        inside.here = Here::Idle { held: next, since };
        self.idle.fetch_add(1, Ordering::Relaxed);
        if inside.place.is_none() {
            inside.place = Some(keeper.stock().put(&self, since));
        }
        drop(inside);
        keeper.make_room();
        true
    }

    /// The next waiting caller asks for it.
    fn went_back(self: Arc<Self>, context: &Context, hold: &Arc<Hold>) {
        let mut inside = self.inside();
        let is_used = matches!(&inside.here, Here::Used(one) if Arc::ptr_eq(one, hold));
        let gone = is_used.then(|| self.next_asks(&mut inside, context));
        drop(inside);
        drop(gone);
        self.leaves();
    }
}

impl Inside {
    /// Whether a caller waits here.
    fn has_line(&self) -> bool {
        self.line.iter().any(|waiter| !waiter.turn.is_closed())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.upgrade() {
            let mut stock = keeper.stock();
            // Another may have come in its place.
            let is_dead = |kept: &Weak<Self>| kept.strong_count() == 0;
            if stock.locks.get(&self.key).is_some_and(is_dead) {
                stock.locks.remove(&self.key);
            }
        }
    }
}

/// Whether the lock may be kept: it is still held, and no other client wants it.
fn may_be_kept(hold: &Hold, now: Instant) -> bool {
    !hold.is_over(now) && hold.wanted.may_be_kept()
}

/// Whether the next caller may have it: it needs half of its lease and of its longest hold. The
/// session must be connected, or a loss would be heard too late.
fn is_fit(hold: &Hold, now: Instant) -> bool {
    let is_heard_of = hold.counts_on().session.is_attached() && !hold.is_of_former_life();
    is_heard_of && may_be_kept(hold, now) && hold.leaves_half(now)
}

fn not_acquired(hold: &Hold, now: Instant) -> Error {
    Error::not_acquired(Some(hold.lease_left(now)))
}

/// A place in the line.
struct Waiting {
    kept: Arc<Kept>,
    number: u64,
    since: Instant,
    told: oneshot::Receiver<Turn>,
}

impl Waiting {
    async fn turn(&mut self, context: &Context, wait_mode: WaitMode) -> Result<Turn, Error> {
        tokio::select! {
            biased;
            turn = &mut self.told => turn.map_err(|_| Error::shut_down()),
            () = context.background.closing.cancelled() => Err(Error::shut_down()),
            error = self.kept.late(context, wait_mode) => Err(error),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut inside = self.kept.inside();
        inside.line.retain(|one| one.number != self.number);
    }
}

/// It is a caller's turn to ask the server. When that ends without the lock, it is the next one's.
struct Asking {
    kept: Arc<Kept>,
    context: Weak<Context>,
    owner: Owner,
    /// See [`Waiter::was_held_up`].
    was_held_up: bool,
}

impl Asking {
    fn is_asked(&self, inside: &Inside) -> bool {
        matches!(&inside.here, Here::Asked(owner) if *owner == self.owner)
    }

    /// It has the lock, which is kept from now on.
    fn entered(self, context: &Arc<Context>, mut taken: Held) -> Held {
        let (lock, hold) = (Arc::clone(&self.kept), Arc::clone(&taken.hold));
        let mut inside = lock.inside();
        if !self.is_asked(&inside) {
            return taken;
        }
        inside.here = Here::Used(Arc::clone(&hold));
        for waiter in &mut inside.line {
            waiter.was_held_up = true;
        }
        drop(inside);
        // Callers whose time is up can be told who keeps them out.
        lock.entered.notify_waiters();
        let background = &context.background;
        let watching = watch(
            self.context.clone(),
            Arc::downgrade(&lock),
            hold,
            background.closing.clone(),
        );
        background.spawn(watching);
        taken.kept = Some(lock);
        taken
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let Some(context) = self.context.upgrade() else {
            return;
        };
        let mut inside = self.kept.inside();
        let gone = self
            .is_asked(&inside)
            .then(|| self.kept.next_asks(&mut inside, &context));
        drop(inside);
        drop(gone);
    }
}

/// Releases a kept lock when another process wants it or it was idle for long enough. It keeps no
/// handle alive meanwhile.
async fn watch(
    context: Weak<Context>,
    kept: Weak<Kept>,
    hold: Arc<Hold>,
    closing: CancellationToken,
) {
    loop {
        // Listens before it looks: what changes in between is heard.
        let mut changed = pin!(hold.changed.notified());
        changed.as_mut().enable();
        let next = match (context.upgrade(), kept.upgrade()) {
            (Some(context), Some(kept)) => {
                // If the server cannot tell us that others wait, the lock must not be kept.
                if hold.wanted.may_be_kept() && listen::listen(&context, &hold).is_err() {
                    hold.wanted.must_go_back();
                }
                kept.look(&context, &hold)
            }
            _ => None,
        };
        let Some(next) = next else { return };
        tokio::select! {
            () = changed => {}
            () = closing.cancelled() => {}
            () = sleep_until(next) => {}
        }
    }
}
