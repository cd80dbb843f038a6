//! Ctrl-c and SIGTERM while a Learner trains. The strategy asks [`Signals`] after every batch.
//!
//! A handler belongs to the process and cannot be removed. While no Learner listens, it therefore
//! does what would happen without it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// Notes signals that ask the process to end, instead of ending it, until it is dropped. The second
/// signal ends the process.
pub(crate) struct Signals {
    seen: Arc<AtomicUsize>,
    actions: Vec<SigId>,
}

/// The handlers that act while no Learner listens, and the number of Learners that do.
struct Idle {
    actions: Vec<SigId>,
    noting: usize,
}

static IDLE: Mutex<Idle> = Mutex::new(Idle { actions: Vec::new(), noting: 0 });

impl Signals {
    pub(crate) fn catch() -> Self {
        let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        idle.noting += 1;
        let signals = Self { seen: Arc::default(), actions: Vec::new() };
        let signals = signals.noting().unwrap_or_else(|error| {
            log::warn!("ctrl-c ends the process, as its signal cannot be caught: {error}");
            Self { seen: Arc::default(), actions: Vec::new() }
        });
        idle.actions.drain(..).for_each(forget);
        signals
    }

    fn noting(mut self) -> io::Result<Self> {
        let again = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // The order matters: the first handler must see that this is not yet the second signal.
            self.actions.push(flag::register_conditional_default(signal, again.clone())?);
            self.actions.push(flag::register(signal, again.clone())?);
            self.actions.push(flag::register_usize(signal, self.seen.clone(), signal as usize)?);
        }
        Ok(self)
    }

    /// The signal that asked the process to end, if any.
    pub(crate) fn seen(&self) -> Option<&'static str> {
        match self.seen.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some("ctrl-c (SIGINT)"),
            _ => Some("SIGTERM"),
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        idle.noting -= 1;
        if idle.noting == 0 {
            let always = Arc::new(AtomicBool::new(true));
            let ends = SIGNALS.iter();
            let ends =
                ends.map(|signal| flag::register_conditional_default(*signal, always.clone()));
            idle.actions = ends.flatten().collect();
        }
        self.actions.drain(..).for_each(forget);
    }
}

fn forget(action: SigId) {
    signal_hook::low_level::unregister(action);
}
