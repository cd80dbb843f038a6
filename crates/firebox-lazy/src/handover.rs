//! Tensors that other threads use while one trains: their ends are left to the training thread.
//!
//! burn's fusion counts the owners of a tensor and decides by the count whether an operation is the last to use it. An
//! operation lets go of its inputs before it is in the queue. If another thread lets go of the same tensor in between,
//! that thread is the last owner, and notes the end of the tensor in the queue before the operation that still needs it:
//! `Should have handle for tensor`, in the thread of the device. burn's checkpointer reads parameters on a thread of its
//! own while training goes on, and so do metrics.
//!
//! While a [`TrainingGuard`] lives, the other threads hold what they use until the call is done, and then leave it here.
//! The training thread lets go of it between two of its own calls. Loader threads are excepted: what they make and drop
//! is nobody else's.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::streams::is_loader_thread;

/// How many training threads there are. With several, nothing is left: it is not known to whom it would belong.
static TRAINING: AtomicUsize = AtomicUsize::new(0);
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

thread_local! {
    static IS_TRAINING: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread, the one that trains, has the turn.
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
    /// What the call that this thread is making uses.
    static USED: RefCell<Vec<Left>> = const { RefCell::new(Vec::new()) };
}

type Left = Box<dyn Any + Send>;

/// Makes the calling thread the one that trains, until it is dropped: it alone ends the tensors of other threads.
///
/// For backends that queue operations and count the owners of tensors, as burn's fusion does; others need it not, and tensors
/// would only live longer.
#[derive(Debug)]
pub struct TrainingGuard {
    /// Stays on its thread.
    thread: PhantomData<*const ()>,
}

impl TrainingGuard {
    /// Makes this thread the training thread.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter();
    /// guard.collect();
    /// ```
    pub fn enter() -> Self {
        IS_TRAINING.set(true);
        TRAINING.fetch_add(1, Ordering::Relaxed);
        Self { thread: PhantomData }
    }

    /// Runs `work`, which queues operations, while no other thread gets at the queue.
    ///
    /// A thread that reads a tensor has burn's fusion run what is queued on the tensor's stream. In the middle of a step that
    /// would cut operations apart that are otherwise run as one, by chance, and with them the memory that they need. So
    /// other threads wait meanwhile; `work` should leave the queue empty, and must not wait for them. The run of a recording
    /// has its queue for itself without this.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter();
    /// assert_eq!(guard.alone(|| 1 + 1), 2);
    /// ```
    pub fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let _turn = TrainingTurn::take();
        work()
    }

    /// Lets go of the tensors that other threads have left so far. Outside a recording.
    pub fn collect(&self) {
        let left = std::mem::take(&mut *left());
        drop(left);
    }
}

impl Drop for TrainingGuard {
    fn drop(&mut self) {
        TRAINING.fetch_sub(1, Ordering::Relaxed);
        IS_TRAINING.set(false);
        self.collect();
    }
}

/// Held by whoever queues operations, while there is a training thread.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The turn of the training thread.
pub(crate) struct TrainingTurn {
    _turn: MutexGuard<'static, ()>,
}

impl TrainingTurn {
    /// Takes the turn, if this is the training thread and has not taken it before.
    pub(crate) fn take() -> Option<Self> {
        if !IS_TRAINING.get() || HAS_TURN.get() {
            return None;
        }
        let _turn = turn();
        HAS_TURN.set(true);
        Some(Self { _turn })
    }
}

impl Drop for TrainingTurn {
    fn drop(&mut self) {
        HAS_TURN.set(false);
    }
}

/// Waits until the training thread has left the queue empty, if this is another thread.
#[inline]
pub(crate) fn wait_for_turn() -> Option<MutexGuard<'static, ()>> {
    is_elsewhere().then(turn)
}

fn left() -> MutexGuard<'static, Vec<Left>> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether tensors are to be left to another thread.
#[inline]
pub(crate) fn is_elsewhere() -> bool {
    TRAINING.load(Ordering::Relaxed) == 1 && is_other_thread()
}

#[cold]
fn is_other_thread() -> bool {
    // A thread that ends has no such values any more, and is not the training thread, which outlives its guard.
    !IS_TRAINING.try_with(Cell::get).unwrap_or(false) && !is_loader_thread()
}

/// Leaves a tensor to the training thread.
pub(crate) fn leave(tensor: impl Any + Send) {
    left().push(Box::new(tensor));
}

/// Holds a tensor until the call that this thread is making is done.
pub(crate) fn hold(tensor: impl Any + Send) {
    USED.with_borrow_mut(|used| used.push(Box::new(tensor)));
}

/// What a call uses; it is left to the training thread when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<Left>);

impl Held {
    /// What this thread holds for the call that it is about to make.
    #[inline]
    pub(crate) fn take() -> Self {
        match is_elsewhere() {
            true => Self(USED.take()),
            false => Self::default(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            left().append(&mut self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// With two training threads in a process, nothing is left to either.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn the_training_thread_takes_its_turn_once() {
        let _alone = ALONE.lock();
        assert!(TrainingTurn::take().is_none(), "nobody trains");
        let guard = TrainingGuard::enter();
        guard.alone(|| assert!(TrainingTurn::take().is_none(), "it has it already"));
        assert!(TrainingTurn::take().is_some(), "it has given it back");
    }

    #[test]
    fn what_another_thread_uses_lives_until_the_training_thread_collects_it() {
        let _alone = ALONE.lock();
        let (used, dropped) = (Arc::new(()), Arc::new(()));
        let guard = TrainingGuard::enter();
        assert!(!is_elsewhere());
        let (theirs, ended) = (used.clone(), dropped.clone());
        let worker = move || {
            assert!(is_elsewhere());
            leave(ended);
            hold(theirs);
            drop(Held::take());
        };
        std::thread::spawn(worker).join().expect("the other thread ends");
        assert_eq!([&used, &dropped].map(Arc::strong_count), [2, 2]);
        guard.collect();
        assert_eq!([&used, &dropped].map(Arc::strong_count), [1, 1]);
        drop(guard);
        std::thread::spawn(|| assert!(!is_elsewhere())).join().expect("nobody trains");
    }
}
