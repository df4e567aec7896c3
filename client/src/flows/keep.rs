//! Locks that are kept for their next use: what a guard gives back stays here for a while, until
//! somebody else wants it.
//!
//! What is kept is in one place: in a guard, on its way to the next in line, or idle here. So two
//! callers of a process exclude each other by that alone, and the server need not be asked; and
//! each grant has an owner that nobody else may use, or it could be entered beside its guard.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::flows::{Context, Held, Request, Waited, acquire, wanted};
use crate::ledger::{Hold, HoldOptions, Usage};
use crate::wire::{Answer, Mode, WaitMode};
use crate::{locked, metrics};

/// All that a client keeps. It ends, and gives back what is idle, with the last of its handles:
/// the client, its clones and what they have named.
pub(crate) struct Keeper {
    pub(crate) context: Arc<Context>,
    /// So many are kept idle.
    most: usize,
    /// So many are idle now.
    idle: Arc<AtomicUsize>,
    stock: Mutex<Stock>,
}

#[derive(Default)]
struct Stock {
    locks: HashMap<KeptKey, Weak<Kept>>,
    /// Those that are idle, or have been since they were put here, by when that was: so long ago at
    /// least were they used. Whoever is used leaves its place as it is, and so costs nothing here.
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
/// Its mutex is taken before that of the stock, and no [`Held`] is dropped under it, for that takes
/// it too.
pub(crate) struct Kept {
    key: KeptKey,
    keeper: Weak<Keeper>,
    /// How many are idle of all.
    idle: Arc<AtomicUsize>,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    here: Here,
    /// Who waits here, first come first served.
    line: VecDeque<Waiter>,
    waiters: u64,
    /// How many calls have asked the server.
    asking: usize,
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
    /// The first call has asked the server, which may still give it the lock at once: those after
    /// it wait for that. Or it has given it, and that is yet to be acknowledged.
    Asked(Option<Arc<Hold>>),
    /// A guard has it.
    Used(Arc<Hold>),
    Idle(Idle),
    /// Others want it, or have it: each call gets into the server's queue.
    Wanted,
}

struct Idle {
    hold: Arc<Hold>,
    usage: Usage,
    since: Instant,
}

struct Waiter {
    number: u64,
    waited: Waited,
    wait_mode: WaitMode,
    turn: oneshot::Sender<Turn>,
}

/// What somebody in line hears.
enum Turn {
    Yours(Held),
    /// Everybody has lined up in the server.
    Asked(Asking),
    /// The time was up before it was known who has it: somebody here does.
    Late(Error),
}

impl Keeper {
    pub(crate) fn new(context: Arc<Context>, most: usize) -> Arc<Self> {
        Arc::new(Self {
            context,
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
        });
        stock.locks.insert(key, Arc::downgrade(&kept));
        kept
    }

    /// Gives back what has been idle for longest, until no more are kept than may be.
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
            let mut inside = kept.inside();
            let idle = kept.take_out(&mut inside);
            kept.give_back(&self.context, inside, idle);
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

impl Kept {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        locked(&self.inside)
    }

    /// The lock, if it is here and idle. No I/O, and nothing to wait for.
    pub(crate) fn take_now(self: &Arc<Self>, context: &Arc<Context>) -> Option<Held> {
        self.take_idle(&mut self.inside(), context)
    }

    fn take_idle(self: &Arc<Self>, inside: &mut Inside, context: &Arc<Context>) -> Option<Held> {
        let idle = match &inside.here {
            Here::Idle(idle) if is_fit(context, &idle.hold, Instant::now()) => {
                self.take_out(inside)?
            }
            _ => return None,
        };
        inside.here = Here::Used(Arc::clone(&idle.hold));
        idle.hold.wanted.begins_anew();
        let kept = Some(Arc::clone(self));
        Some(Held::of(context, idle.hold, idle.usage, kept))
    }

    /// Takes the lock: from whom it is in this process if nobody else wants it, and otherwise from
    /// the server. If the future is dropped, so is all that it was given.
    pub(crate) async fn take(
        self: &Arc<Self>,
        context: &Arc<Context>,
        wait_mode: WaitMode,
    ) -> Result<Held, Error> {
        let turn = match self.begin(context, wait_mode)? {
            Next::Take(turn) => turn,
            Next::Wait(mut waiting) => {
                let turn = waiting.turn(context, wait_mode).await;
                // One that has asked the server is measured by that call.
                if !matches!(turn, Ok(Turn::Asked(_))) {
                    metrics::waited(waiting.since);
                }
                turn?
            }
        };
        match turn {
            Turn::Yours(held) => Ok(held),
            Turn::Late(error) => Err(error),
            Turn::Asked(mut asking) => {
                let held = (&mut asking.answer).await?;
                Ok(asking.entered(held))
            }
        }
    }

    fn begin(self: &Arc<Self>, context: &Arc<Context>, wait_mode: WaitMode) -> Result<Next, Error> {
        let mut inside = self.inside();
        if let Some(held) = self.take_idle(&mut inside, context) {
            return Ok(Next::Take(Turn::Yours(held)));
        }
        let now = Instant::now();
        // Before the lock is asked for: what this process keeps is in nobody's way.
        let unfit = self.take_out(&mut inside);
        let was_here = unfit.is_some();
        release(context, unfit);
        // The guard does not know yet that it has lost it. Those in line came before.
        let is_lost = matches!(&inside.here, Here::Used(hold) if hold.is_over(now));
        let gone = is_lost.then(|| self.line_up(&mut inside, context));
        let waits = !matches!(wait_mode, WaitMode::None);
        let next = match &inside.here {
            Here::Used(hold) if !waits => {
                hold.is_wanted_here();
                Err(not_acquired(hold, now))
            }
            // Asked now, the server might let it pass those who wait here.
            Here::Asked(_) if !waits && inside.has_line() => {
                Err(Error::not_acquired(Some(Duration::ZERO)))
            }
            Here::Used(_) | Here::Asked(_) if waits => Ok(self.wait(&mut inside, wait_mode)),
            _ => {
                let asking = self.ask(&mut inside, context, wait_mode, None);
                if let Here::Away = inside.here {
                    inside.here = Here::Asked(None);
                }
                Ok(Next::Take(Turn::Asked(asking)))
            }
        };
        drop(inside);
        drop(gone);
        if was_here {
            self.leaves();
        }
        next
    }

    /// What no guard has any more. The RELEASE is handed over under the mutex: a call that finds
    /// nothing here asks behind it, and is not refused by it.
    fn give_back(
        &self,
        context: &Arc<Context>,
        inside: MutexGuard<'_, Inside>,
        idle: Option<Idle>,
    ) {
        let was_here = idle.is_some();
        release(context, idle);
        drop(inside);
        if was_here {
            self.leaves();
        }
    }

    /// What is idle here, if anything is.
    fn take_out(&self, inside: &mut Inside) -> Option<Idle> {
        let idle = inside.take_idle()?;
        self.idle.fetch_sub(1, Ordering::Relaxed);
        Some(idle)
    }

    fn wait(self: &Arc<Self>, inside: &mut Inside, wait_mode: WaitMode) -> Next {
        inside.waiters = inside.waiters.saturating_add(1);
        let (turn, told) = oneshot::channel();
        let (number, since) = (inside.waiters, Instant::now());
        let was_held_up = matches!(inside.here, Here::Used(_));
        inside.line.push_back(Waiter {
            number,
            waited: Waited { since, was_held_up },
            wait_mode,
            turn,
        });
        if let Here::Used(hold) = &inside.here {
            hold.is_wanted_here();
        }
        let kept = Arc::clone(self);
        Next::Wait(Waiting {
            kept,
            number,
            since,
            told,
        })
    }

    /// Asks the server, for an owner of its own. It is handed over at once, and so under the mutex:
    /// the calls of this process join the queue in the order in which they came.
    fn ask(
        self: &Arc<Self>,
        inside: &mut Inside,
        context: &Arc<Context>,
        wait_mode: WaitMode,
        waited: Option<Waited>,
    ) -> Asking {
        inside.asking = inside.asking.saturating_add(1);
        let name = std::slice::from_ref(&self.key.name);
        let answer = acquire::start(Request {
            context: Arc::clone(context),
            target: context
                .owner()
                .of_kept()
                .target(&context.ledger, Mode::Plain, name),
            options: self.key.options,
            wait_mode,
            own: true,
            passing: false,
            kept: Some(Arc::clone(self)),
            waited,
        });
        Asking {
            kept: Arc::clone(self),
            context: Arc::clone(context),
            answer,
            is_over: false,
        }
    }

    /// The server has put a call of ours into its queue, or the call has failed, of which its
    /// caller may hear late: those who wait here ask the server too.
    pub(super) fn is_away(self: &Arc<Self>, context: &Arc<Context>) {
        let mut inside = self.inside();
        if let Here::Asked(_) = inside.here {
            let gone = self.line_up(&mut inside, context);
            drop(inside);
            drop(gone);
        }
    }

    /// The server has given it to a call of ours, and that is yet to be acknowledged, or to be
    /// heard of by its caller.
    pub(super) fn is_granted(&self, hold: &Arc<Hold>) {
        let mut inside = self.inside();
        if let Here::Asked(granted) = &mut inside.here {
            *granted = Some(Arc::clone(hold));
            inside.tell_late(hold);
        }
    }

    /// Whether somebody waits here.
    pub(super) fn has_line(&self) -> bool {
        self.inside().has_line()
    }

    /// Everybody in line asks the server, in order, and so do those who come from now on, until all
    /// of them have been answered. To be dropped when the mutex is free: what is of no use to
    /// anybody.
    #[must_use = "it is dropped when the mutex is free"]
    fn line_up(self: &Arc<Self>, inside: &mut Inside, context: &Arc<Context>) -> Vec<Turn> {
        let line = mem::take(&mut inside.line);
        let mut gone = Vec::new();
        for waiter in line.into_iter().filter(|waiter| !waiter.turn.is_closed()) {
            let asking = self.ask(inside, context, waiter.wait_mode, Some(waiter.waited));
            gone.extend(waiter.turn.send(Turn::Asked(asking)).err());
        }
        inside.is_nobodys();
        gone
    }

    /// A guard gives the lock back. To the server it goes if this gives it back too.
    pub(super) fn put_back(
        self: &Arc<Self>,
        context: &Arc<Context>,
        hold: &Arc<Hold>,
        usage: Usage,
    ) -> Option<Usage> {
        // Should it be the last handle, it ends when the mutex is free.
        let keeper = self.keeper.upgrade();
        let mut inside = self.inside();
        let since = Instant::now();
        let is_used = inside.is_used(hold);
        let is_fit = is_used && is_fit(context, hold, since);
        let Some(keeper) = keeper.as_ref().filter(|_| is_fit) else {
            let gone = is_used.then(|| self.line_up(&mut inside, context));
            drop(inside);
            drop(gone);
            self.leaves();
            hold.changed.notify_waiters();
            return Some(usage);
        };
        let usage = self.hand_over(&mut inside, context, hold, usage)?;
        let until = since.checked_add(self.key.idle);
        if until.is_some_and(|until| inside.next_look.is_some_and(|next| until < next)) {
            inside.next_look = until;
            hold.changed.notify_waiters();
        }
        let hold = Arc::clone(hold);
        inside.here = Here::Idle(Idle { hold, usage, since });
        self.idle.fetch_add(1, Ordering::Relaxed);
        if inside.place.is_none() {
            inside.place = Some(keeper.stock().put(self, since));
        }
        drop(inside);
        keeper.make_room();
        None
    }

    /// To the first in line who still waits; given back if there is none.
    fn hand_over(
        self: &Arc<Self>,
        inside: &mut Inside,
        context: &Arc<Context>,
        hold: &Arc<Hold>,
        mut usage: Usage,
    ) -> Option<Usage> {
        hold.wanted.begins_anew();
        while let Some(waiter) = inside.line.pop_front() {
            let kept = Some(Arc::clone(self));
            let next = Held::of(context, Arc::clone(hold), usage, kept);
            match waiter.turn.send(Turn::Yours(next)) {
                Err(Turn::Yours(gone)) => usage = gone.into_usage()?,
                _ => return None,
            }
        }
        Some(usage)
    }

    /// Others were used later, so it has lost its place. If it was used since it was put there it
    /// gets one that says so.
    fn must_leave(self: Arc<Self>, keeper: &Keeper, place: Place) {
        let mut inside = self.inside();
        if inside.place != Some(place) {
            return;
        }
        inside.place = None;
        let idle = match &inside.here {
            Here::Idle(idle) if idle.since > place.0 => {
                inside.place = Some(keeper.stock().put(&self, idle.since));
                None
            }
            _ => self.take_out(&mut inside),
        };
        self.give_back(&keeper.context, inside, idle);
    }

    /// Gives its place up, unless it has something.
    fn leaves(&self) {
        let mut inside = self.inside();
        let place = match inside.here {
            Here::Used(_) | Here::Idle(_) => None,
            Here::Away | Here::Asked(_) | Here::Wanted => inside.place.take(),
        };
        drop(inside);
        if let (Some(place), Some(keeper)) = (place, self.keeper.upgrade()) {
            let left = keeper.stock().idle.remove(&place);
            drop(left);
        }
    }

    /// When to look again at a hold that is kept. Never, if it is not any more: because it has gone
    /// back, or is now to go back, at once if it is idle and otherwise after its present use.
    fn look(self: &Arc<Self>, context: &Arc<Context>, hold: &Arc<Hold>) -> Option<Instant> {
        let mut inside = self.inside();
        let now = Instant::now();
        let is_over = !may_be_kept(context, hold, now);
        match &inside.here {
            Here::Used(used) if Arc::ptr_eq(used, hold) => {
                if is_over {
                    let gone = self.line_up(&mut inside, context);
                    drop(inside);
                    drop(gone);
                    return None;
                }
                inside.next_look = Some(hold.end());
            }
            Here::Idle(idle) if Arc::ptr_eq(&idle.hold, hold) => {
                let until = idle.since.checked_add(self.key.idle).filter(|_| !is_over);
                if until.is_none_or(|until| until <= now) {
                    let idle = self.take_out(&mut inside);
                    self.give_back(context, inside, idle);
                    return None;
                }
                inside.next_look = until.map(|until| until.min(hold.end()));
            }
            _ => return None,
        }
        inside.next_look
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

impl Inside {
    fn is_used(&self, hold: &Arc<Hold>) -> bool {
        matches!(&self.here, Here::Used(used) if Arc::ptr_eq(used, hold))
    }

    fn has_line(&self) -> bool {
        self.line.iter().any(|waiter| !waiter.turn.is_closed())
    }

    /// Those in line whose time is up hear that this hold keeps them out.
    fn tell_late(&mut self, hold: &Hold) {
        let now = Instant::now();
        let is_late = |waiter: &Waiter| match waiter.wait_mode {
            WaitMode::Until(deadline) => deadline <= now,
            WaitMode::None | WaitMode::Forever => false,
        };
        let line = mem::take(&mut self.line).into_iter();
        let (late, in_time): (Vec<_>, Vec<_>) = line.partition(is_late);
        self.line = in_time.into();
        for waiter in late {
            // Who does not hear it has gone.
            let _ = waiter.turn.send(Turn::Late(not_acquired(hold, now)));
        }
    }

    /// Nobody here has it any more, or who has it gives it back to the server.
    fn is_nobodys(&mut self) {
        self.here = match self.asking {
            0 => Here::Away,
            _ => Here::Wanted,
        };
    }

    fn take_idle(&mut self) -> Option<Idle> {
        match mem::take(&mut self.here) {
            Here::Idle(idle) => {
                self.is_nobodys();
                Some(idle)
            }
            other => {
                self.here = other;
                None
            }
        }
    }
}

/// Whether it may be kept: nobody else wants it, and the client goes on.
fn may_be_kept(context: &Context, hold: &Hold, now: Instant) -> bool {
    !hold.is_over(now) && hold.wanted.may_be_kept() && !context.background.closing.is_cancelled()
}

/// Whether it may be given to the next caller, for whom at least half of the lease and of the
/// longest hold have to be left that it asked for. And the session has to be there under which it
/// is held: of what was lost without it, a guard would hear too late.
fn is_fit(context: &Context, hold: &Hold, now: Instant) -> bool {
    let attached = context.router.attached(hold.target.key());
    let is_heard_of = attached.is_some_and(|at| Arc::ptr_eq(&at.attachment, &hold.attachment()));
    is_heard_of && may_be_kept(context, hold, now) && hold.leaves_half(now)
}

/// Gives what is idle back to the server.
fn release(context: &Arc<Context>, idle: Option<Idle>) {
    if let Some(idle) = idle {
        // Who watches it has nothing more to do.
        idle.hold.changed.notify_waiters();
        drop(Held::of(context, idle.hold, idle.usage, None));
    }
}

fn not_acquired(hold: &Hold, now: Instant) -> Error {
    Error::not_acquired(Some(hold.lease_left(now)))
}

enum Next {
    Take(Turn),
    Wait(Waiting),
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

impl Kept {
    /// Ends when the time of one in line is up. While the server has not answered the first call,
    /// nobody knows whether it can be had: that is waited for as long as for any answer.
    async fn late(&self, context: &Context, wait_mode: WaitMode) -> Error {
        let WaitMode::Until(deadline) = wait_mode else {
            return std::future::pending().await;
        };
        sleep_until(deadline).await;
        if let Here::Used(hold) | Here::Asked(Some(hold)) = &self.inside().here {
            return not_acquired(hold, Instant::now());
        }
        let answered = deadline.checked_add(context.router.response_timeout);
        sleep_until(answered.unwrap_or(deadline)).await;
        Error::unavailable("the server has not answered a call before this")
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut inside = self.kept.inside();
        let place = inside
            .line
            .binary_search_by_key(&self.number, |one| one.number);
        if let Ok(place) = place {
            inside.line.remove(place);
        }
    }
}

/// A call that has asked the server. When it ends without the lock, those in line ask too.
struct Asking {
    kept: Arc<Kept>,
    context: Arc<Context>,
    answer: Answer<Held>,
    is_over: bool,
}

impl Asking {
    /// It has the lock, which is kept from now on.
    fn entered(mut self, mut taken: Held) -> Held {
        self.is_over = true;
        let (lock, hold) = (Arc::clone(&self.kept), Arc::clone(&taken.hold));
        let mut inside = lock.inside();
        inside.asking = inside.asking.saturating_sub(1);
        // One that the server has given us anew was lost here.
        let lost = lock.take_out(&mut inside);
        // Others have asked before those who may still come: it goes back for them.
        let is_wanted = inside.asking > 0;
        let gone = is_wanted.then(|| lock.line_up(&mut inside, &self.context));
        if !is_wanted {
            inside.tell_late(&hold);
            for waiter in &mut inside.line {
                waiter.waited.was_held_up = true;
            }
            inside.here = Here::Used(Arc::clone(&hold));
        }
        lock.give_back(&self.context, inside, lost);
        drop(gone);
        if is_wanted {
            return taken;
        }
        let background = &self.context.background;
        let (context, closing) = (Arc::downgrade(&self.context), background.closing.clone());
        background.spawn(watch(context, Arc::downgrade(&lock), hold, closing));
        taken.kept = Some(lock);
        taken
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut inside = self.kept.inside();
        inside.asking = inside.asking.saturating_sub(1);
        let is_last = inside.asking == 0 && matches!(inside.here, Here::Asked(_) | Here::Wanted);
        let gone = is_last.then(|| self.kept.line_up(&mut inside, &self.context));
        drop(inside);
        drop(gone);
    }
}

/// Sees to it that what is kept goes to the server's queue as soon as it is wanted there, or has
/// been idle for long enough. It keeps nothing alive meanwhile.
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
                // Who cannot hear of others must not keep the lock from them.
                if hold.wanted.may_be_kept() && wanted::listen(&context, &hold).is_err() {
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
