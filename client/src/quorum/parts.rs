//! The holds behind a guard, one a server, and whether they are still a majority.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::api::Guard;
use crate::error::{Error, ErrorKind};
use crate::flows::lost;
use crate::ledger::Hold;
use crate::locked;
use crate::lost_reason::LostReason;
use crate::quorum::client::Core;
use crate::quorum::error::QuorumError;
use crate::quorum::majority::validity;

/// What a guard holds, shared with the task that looks after it.
pub(crate) struct Parts {
    core: Arc<Core>,
    /// When it ends at the latest.
    cap: Option<Instant>,
    state: Mutex<State>,
}

struct State {
    parts: Vec<Part>,
    end: End,
}

enum End {
    NotYet,
    Lost(QuorumError),
    GivenBack,
}

/// What is held on one server.
struct Part {
    guard: Option<Arc<Guard>>,
    /// Why nothing is.
    why_not: Option<Error>,
    /// Of the first grant.
    token: Option<u64>,
}

impl Part {
    /// Why it does not count; `None` if it does.
    fn trouble(&self) -> Option<Error> {
        match &self.guard {
            Some(guard) => guard.lost_already().map(Error::lost),
            None => Some(self.why_not.clone().unwrap_or_else(Error::not_attached)),
        }
    }

    fn live(&self) -> Option<&Arc<Guard>> {
        let guard = self.guard.as_ref();
        guard.filter(|guard| !guard.is_lost())
    }

    fn put(&mut self, guard: Guard) {
        self.token.get_or_insert(guard.token());
        self.guard = Some(Arc::new(guard));
        self.why_not = None;
    }

    /// Whether it may be taken again: not where an operator has ended it.
    fn is_missing(&self) -> bool {
        let over = self.guard.as_ref().map(|guard| guard.lost_already());
        match over {
            None => true,
            Some(None) => false,
            Some(Some(reason)) => !matches!(
                reason,
                LostReason::Broken
                    | LostReason::Deleted
                    | LostReason::SessionTakenOver
                    | LostReason::MaxHold
            ),
        }
    }
}

impl State {
    /// What counts, by its server.
    fn live(&self) -> impl Iterator<Item = (usize, &Arc<Guard>)> {
        let parts = self.parts.iter().enumerate();
        parts.filter_map(|(server, part)| Some((server, part.live()?)))
    }
}

impl Parts {
    /// A majority that has been granted, and why the other servers have not.
    pub(crate) fn new(
        core: &Arc<Core>,
        granted: Vec<(usize, Guard)>,
        answers: Vec<Option<Error>>,
        cap: Option<Instant>,
    ) -> Arc<Self> {
        let part = |why_not| Part {
            guard: None,
            why_not,
            token: None,
        };
        let mut parts: Vec<_> = answers.into_iter().map(part).collect();
        for (server, guard) in granted {
            if let Some(part) = parts.get_mut(server) {
                part.put(guard);
            }
        }
        let end = End::NotYet;
        Arc::new(Self {
            core: Arc::clone(core),
            cap,
            state: Mutex::new(State { parts, end }),
        })
    }

    /// Why it is lost, if it is. Once lost it stays lost, and what is left of it is given back.
    pub(crate) fn lost(&self) -> Option<QuorumError> {
        self.look(&mut locked(&self.state))
    }

    /// How long it may still be called held; zero once lost.
    pub(crate) fn valid_for(&self) -> Duration {
        let state = locked(&self.state);
        let left = state.live().map(|(_, guard)| guard.valid_for());
        validity(left, self.core.need)
    }

    /// Ends when it is lost, at the latest with its validity.
    ///
    /// What joins meanwhile need not be listened to: as long as those that were there are not lost
    /// they are a majority.
    pub(crate) async fn until_lost(&self) -> QuorumError {
        loop {
            if let Some(lost) = self.lost() {
                return lost;
            }
            lost(self.holds().iter()).await;
        }
    }

    /// Adds what a server has granted, or why it has not. Given back at once if it is too late.
    /// Returns why nothing counts there, if nothing does.
    pub(crate) fn join(&self, server: usize, answer: Result<Guard, Error>) -> Option<Error> {
        let mut state = locked(&self.state);
        // Looked at before: with this one there may be a majority again, but there was none in
        // between, and somebody else may have had one.
        if self.is_over(&mut state) {
            return state.parts.get(server)?.trouble();
        }
        let answer = answer.and_then(|guard| {
            let live = state.live().map(|(other, held)| (other, &**held));
            self.core.only_vote(guard, live)
        });
        let part = state.parts.get_mut(server)?;
        match answer {
            Ok(guard) if part.live().is_none() => part.put(guard),
            Err(error) if part.guard.is_none() => part.why_not = Some(error),
            _ => {}
        }
        part.trouble()
    }

    /// The servers on which it is to be taken again, and for how long at most; none once it has
    /// been given back, though nothing is held there and the releases may take long to be
    /// confirmed. What was held there is given back first: by our clock it is lost, but the server
    /// may not know.
    pub(crate) fn missing(&self) -> (Vec<usize>, Option<Duration>) {
        let left = self
            .cap
            .map(|cap| cap.saturating_duration_since(Instant::now()));
        let mut state = locked(&self.state);
        if self.is_over(&mut state) || left.is_some_and(|left| left.is_zero()) {
            return (Vec::new(), left);
        }
        let mut missing = Vec::new();
        for (server, part) in state.parts.iter_mut().enumerate() {
            if part.is_missing() {
                part.why_not = part.trouble();
                part.guard = None;
                missing.push(server);
            }
        }
        (missing, left)
    }

    /// What counts, by its server.
    pub(crate) fn live(&self) -> Vec<(usize, Arc<Guard>)> {
        let state = locked(&self.state);
        let live = state.live();
        live.map(|(server, guard)| (server, Arc::clone(guard)))
            .collect()
    }

    /// What is wrong with each server's part.
    pub(crate) fn troubles(&self) -> Vec<Option<Error>> {
        locked(&self.state)
            .parts
            .iter()
            .map(Part::trouble)
            .collect()
    }

    /// The first token of each server, by its number.
    pub(crate) fn tokens(&self) -> Vec<(usize, u64)> {
        let state = locked(&self.state);
        let parts = state.parts.iter().enumerate();
        parts
            .filter_map(|(server, part)| Some((server, part.token?)))
            .collect()
    }

    /// Takes out what is to be given back. Nothing joins any more.
    pub(crate) fn close(&self) -> Result<Vec<(usize, Guard)>, QuorumError> {
        let mut state = locked(&self.state);
        if let Some(lost) = self.look(&mut state) {
            return Err(lost);
        }
        state.end = End::GivenBack;
        let parts = state.parts.iter_mut().enumerate();
        let guards = parts.filter_map(|(server, part)| {
            // A renewal by hand borrows the guard whose end this is: no other has it.
            let guard = Arc::into_inner(part.guard.take()?)?;
            Some((server, guard))
        });
        Ok(guards.collect())
    }

    fn holds(&self) -> Vec<Arc<Hold>> {
        let state = locked(&self.state);
        let live = state.live();
        live.map(|(_, guard)| Arc::clone(guard.hold())).collect()
    }

    /// Whether it is lost or has been given back: then nothing joins any more.
    fn is_over(&self, state: &mut State) -> bool {
        self.look(state).is_some() || matches!(state.end, End::GivenBack)
    }

    fn look(&self, state: &mut State) -> Option<QuorumError> {
        match &state.end {
            End::Lost(error) => return Some(error.clone()),
            End::GivenBack => return None,
            End::NotYet => {}
        }
        let troubles: Vec<_> = state.parts.iter().map(Part::trouble).collect();
        let held = troubles.iter().filter(|trouble| trouble.is_none()).count();
        if held >= self.core.need {
            return None;
        }
        let what = "still held it";
        let error = self.core.error(ErrorKind::Lost, held, what, troubles);
        state.end = End::Lost(error.clone());
        for part in &mut state.parts {
            part.guard = None;
        }
        Some(error)
    }
}
