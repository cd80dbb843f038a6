//! Tensors that other threads use during training, and how the training thread ends them.
//!
//! burn's fusion counts the owners of a tensor, and from the count decides whether an operation is
//! the last to use it. An operation releases its inputs before it is in the queue. If another
//! thread releases the same tensor in between, it counts as the last owner. It then queues the
//! tensor's end before the operation that still needs the tensor, and the device's thread panics
//! with `Should have handle for tensor`. burn's checkpointer and metrics read tensors on threads of
//! their own while training goes on.
//!
//! While a [`TrainingGuard`] lives, other threads hold what they use until the call is done and
//! then leave it here. A training thread drops it between two of its own calls. If much is left,
//! the other thread drops it between two of its calls. Either holds the turn at the queue
//! meanwhile, so nobody is in the middle of an operation. Several Learners in a process share one
//! turn.

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use burn_backend::Backend;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::threads::locks;

/// The number of training guards that live, and the backend of each.
static TRAINING: AtomicUsize = AtomicUsize::new(0);
static BACKENDS: RwLock<Vec<TypeId>> = RwLock::new(Vec::new());
static LEFT: Mutex<Vec<(u64, Left)>> = Mutex::new(Vec::new());
/// Tensors of recordings before this number may end once other threads have left them.
static DONE_BEFORE: AtomicU64 = AtomicU64::new(u64::MAX);

/// How many tensors may be left before another thread drops them itself. Otherwise what a metric
/// computes would pile up during a long step.
const MOST_LEFT: usize = 64;

/// How long a thread may hold the turn without a call of a training thread before others go on
/// without it. The holder may be waiting for one of them.
const PATIENCE: Duration = Duration::from_secs(10);

thread_local! {
    /// The number of guards this thread holds.
    static GUARDS: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread holds the turn.
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
    /// What the current call of this thread uses.
    static USED: RefCell<Vec<(u64, Left)>> = const { RefCell::new(Vec::new()) };
}

type Left = Box<dyn Any + Send>;

/// Marks the calling thread as a training thread until it is dropped. What other threads have used
/// ends in this thread's turn at the queue.
///
/// For backends that queue operations and count the owners of tensors, such as burn's fusion. Other
/// backends don't need it; tensors would only live longer.
#[derive(Debug)]
pub struct TrainingGuard {
    backend: TypeId,
    /// Keeps the guard on its thread.
    thread: PhantomData<*const ()>,
}

impl TrainingGuard {
    /// Marks this thread as one that trains on `Lazy<B>`.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter::<burn::backend::Flex>();
    /// guard.collect();
    /// ```
    pub fn enter<B: Backend>() -> Self {
        let backend = TypeId::of::<B>();
        GUARDS.set(GUARDS.get() + 1);
        locks::taken();
        BACKENDS.write().push(backend);
        TRAINING.fetch_add(1, Ordering::Relaxed);
        Self { backend, thread: PhantomData }
    }

    /// Runs `work`, which queues operations, while no other thread can use the queue.
    ///
    /// When a thread reads a tensor, burn's fusion runs what is queued on the tensor's stream. In
    /// the middle of a step this separates operations that would otherwise run as one, and the
    /// memory they need changes by chance. Other threads therefore wait. `work` should leave the
    /// queue empty and must not wait for other threads. A recording that runs has the queue to
    /// itself without this method.
    ///
    /// Two exceptions: threads of rayon do not wait, because `work` may wait for them; and after
    /// ten seconds in which `work` has made no call, no thread waits.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter::<burn::backend::Flex>();
    /// assert_eq!(guard.alone(|| 1 + 1), 2);
    /// ```
    pub fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let _turn = TrainingTurn::take();
        work()
    }

    /// Declares that other threads are done with the tensors of all recordings before number
    /// `recording`, a value that [`latest_recording`](crate::latest_recording) has returned.
    ///
    /// Tensors of this recording and later ones are kept until another call releases them, however
    /// early the other threads let go of them. Otherwise it would be a race when the memory of a
    /// step's outputs becomes free. Without any call, tensors end as they come.
    ///
    /// ```
    /// use firebox_lazy::{TrainingGuard, latest_recording};
    ///
    /// let guard = TrainingGuard::enter::<burn::backend::Flex>();
    /// guard.done_before(latest_recording());
    /// ```
    pub fn done_before(&self, recording: u64) {
        DONE_BEFORE.store(recording, Ordering::Relaxed);
    }

    /// Drops the tensors that other threads have left so far. Call it outside a recording.
    pub fn collect(&self) {
        let turn = TrainingTurn::take();
        if HAS_TURN.get() {
            collect();
        }
        drop(turn);
    }
}

impl Drop for TrainingGuard {
    fn drop(&mut self) {
        self.collect();
        TRAINING.fetch_sub(1, Ordering::Relaxed);
        GUARDS.set(GUARDS.get() - 1);
        locks::taken();
        let mut backends = BACKENDS.write();
        let own = backends.iter().position(|backend| *backend == self.backend);
        own.map(|own| backends.swap_remove(own));
        drop(backends);
        // Threads that still saw this thread train may have left something in between.
        if TRAINING.load(Ordering::Relaxed) == 0 {
            DONE_BEFORE.store(u64::MAX, Ordering::Relaxed);
            collect();
        }
    }
}

/// Drops what was left and may end. The caller holds the turn, or nobody trains any more.
fn collect() {
    let done = DONE_BEFORE.load(Ordering::Relaxed);
    locks::taken();
    let ended: Vec<_> = LEFT.lock().extract_if(.., |(recording, _)| *recording < done).collect();
    drop(ended);
}

/// Held by whoever queues operations while there is a training thread.
static TURN: Mutex<()> = Mutex::new(());
/// The number of calls training threads have made.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// The value of [`CALLS`] when a holder of the turn was last found waiting.
static WAITS: AtomicU64 = AtomicU64::new(u64::MAX);

/// Counts a call of a training thread.
pub(crate) fn tick() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// A training thread's turn.
pub(crate) struct TrainingTurn {
    _turn: MutexGuard<'static, ()>,
}

impl TrainingTurn {
    /// Takes the turn. `None` if this is not a training thread, if it already has the turn, or if
    /// another holder has it for so long that it may be waiting for this thread.
    pub(crate) fn take() -> Option<Self> {
        if GUARDS.get() == 0 || HAS_TURN.get() {
            return None;
        }
        let _turn = patient_turn()?;
        HAS_TURN.set(true);
        Some(Self { _turn })
    }
}

impl Drop for TrainingTurn {
    fn drop(&mut self) {
        HAS_TURN.set(false);
    }
}

/// Held by a thread that does not train while it makes a call: the turn, or `None` if it goes on
/// without.
pub(crate) struct TheirTurn(Option<MutexGuard<'static, ()>>);

/// Waits until no training thread holds the turn. `None`, without waiting, if this thread need not
/// leave tensors to another one or has the turn already.
#[inline]
pub(crate) fn wait_for_turn<B: Backend>() -> Option<TheirTurn> {
    (is_elsewhere::<B>() && !HAS_TURN.get()).then(|| {
        let turn = theirs();
        HAS_TURN.set(turn.is_some());
        TheirTurn(turn)
    })
}

#[cold]
fn theirs() -> Option<MutexGuard<'static, ()>> {
    locks::taken();
    // A training thread may wait for rayon's threads, for example in an optimizer that uses them.
    match rayon::current_thread_index() {
        Some(_) => TURN.try_lock(),
        None => patient_turn(),
    }
}

/// Waits for the turn. `None` if its holder has made no call for [`PATIENCE`].
fn patient_turn() -> Option<MutexGuard<'static, ()>> {
    locks::taken();
    let calls = || CALLS.load(Ordering::Relaxed);
    if WAITS.load(Ordering::Relaxed) == calls() {
        return TURN.try_lock();
    }
    loop {
        let before = calls();
        if let Some(turn) = TURN.try_lock_for(PATIENCE) {
            return Some(turn);
        }
        if calls() == before {
            log::warn!(
                "a training thread has the device's queue and makes no call: other threads go on"
            );
            WAITS.store(before, Ordering::Relaxed);
            return None;
        }
    }
}

impl Drop for TheirTurn {
    /// Leaves what the call has used to the training thread.
    fn drop(&mut self) {
        drop(InUse(USED.take()));
        let is_over = TRAINING.load(Ordering::Relaxed) == 0;
        if is_over || self.0.is_some() && LEFT.lock().len() > MOST_LEFT {
            collect();
        }
        HAS_TURN.set(false);
    }
}

/// Whether this thread must leave tensors of the backend to another thread.
#[inline]
pub(crate) fn is_elsewhere<B: Backend>() -> bool {
    TRAINING.load(Ordering::Relaxed) > 0 && is_other_thread(TypeId::of::<B>())
}

#[cold]
fn is_other_thread(backend: TypeId) -> bool {
    // The thread-local is gone on a thread that is ending. Such a thread is not a training thread,
    // because a training thread outlives its guard.
    let trains = GUARDS.try_with(Cell::get).is_ok_and(|guards| guards > 0);
    if trains {
        tick();
    }
    if trains {
        return false;
    }
    locks::taken();
    BACKENDS.read().contains(&backend)
}

/// Leaves a tensor to the training thread. `recording` is the number of the recording that made it,
/// or zero.
pub(crate) fn leave(recording: u64, tensor: impl Any + Send) {
    locks::taken();
    LEFT.lock().push((recording, Box::new(tensor)));
}

/// Holds a tensor until the current call of this thread is done. `recording` is the number of the
/// recording that made it, or zero.
pub(crate) fn hold(recording: u64, tensor: impl Any + Send) {
    USED.with_borrow_mut(|used| used.push((recording, Box::new(tensor))));
}

/// What a call uses. Left to the training thread on drop.
#[derive(Debug, Default)]
pub(crate) struct InUse(Vec<(u64, Left)>);

impl InUse {
    /// What this thread holds for the call it is about to make. Empty if it need not leave tensors.
    #[inline]
    pub(crate) fn take<B: Backend>() -> Self {
        match is_elsewhere::<B>() {
            true => Self(USED.take()),
            false => Self::default(),
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            locks::taken();
            LEFT.lock().append(&mut self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::{scope, spawn};
    use std::time::Instant;

    use burn::backend::{Autodiff, Flex};

    use super::*;

    /// Serializes the tests, because training threads of other tests take the turn and drop what is
    /// left.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn the_training_thread_takes_its_turn_once() {
        let _alone = ALONE.lock();
        assert!(TrainingTurn::take().is_none(), "nobody trains");
        let guard = TrainingGuard::enter::<Flex>();
        guard.alone(|| assert!(TrainingTurn::take().is_none(), "it has it already"));
        assert!(TrainingTurn::take().is_some(), "it has given it back");
    }

    #[test]
    fn what_another_thread_uses_lives_until_a_training_thread_collects_it() {
        let _alone = ALONE.lock();
        let (used, dropped) = (Arc::new(()), Arc::new(()));
        let guard = TrainingGuard::enter::<Flex>();
        let other = spawn(|| drop(TrainingGuard::enter::<Flex>()));
        assert!(!is_elsewhere::<Flex>());
        let (theirs, ended) = (used.clone(), dropped.clone());
        other.join().expect("the other one has trained");
        let worker = move || {
            assert!(is_elsewhere::<Flex>());
            assert!(!is_elsewhere::<Autodiff<Flex>>(), "nobody trains on it");
            leave(0, ended);
            hold(0, theirs);
            drop(InUse::take::<Flex>());
        };
        spawn(worker).join().expect("the other thread ends");
        assert_eq!([&used, &dropped].map(Arc::strong_count), [2, 2]);
        guard.collect();
        assert_eq!([&used, &dropped].map(Arc::strong_count), [1, 1]);
        drop(guard);
        spawn(|| assert!(!is_elsewhere::<Flex>())).join().expect("nobody trains");
    }

    #[test]
    fn what_a_recording_made_ends_once_the_others_are_done_with_it() {
        let _alone = ALONE.lock();
        let made = [1, 2, 3].map(|_| Arc::new(()));
        let left = |recording: usize| Arc::strong_count(&made[recording - 1]) - 1;
        let guard = TrainingGuard::enter::<Flex>();
        guard.done_before(2);
        let theirs = made.clone();
        let leave_all = || (1..).zip(theirs).for_each(|(recording, made)| leave(recording, made));
        scope(|scope| drop(scope.spawn(leave_all)));
        guard.collect();
        assert_eq!([1, 2, 3].map(left), [0, 1, 1]);
        guard.done_before(3);
        guard.collect();
        assert_eq!([1, 2, 3].map(left), [0, 0, 1]);
        drop(guard);
        assert_eq!(left(3), 0, "nobody trains any more");
    }

    #[test]
    fn a_second_training_thread_waits_for_the_turn_of_the_first() {
        let _alone = ALONE.lock();
        let guard = TrainingGuard::enter::<Flex>();
        let kept = Arc::new(());
        let theirs = kept.clone();
        let other = guard.alone(|| {
            spawn(|| leave(0, theirs)).join().expect("it leaves something");
            let other = spawn(|| TrainingGuard::enter::<Flex>().collect());
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(Arc::strong_count(&kept), 2, "nobody lets go of it in this turn");
            other
        });
        other.join().expect("it has its turn now");
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    #[test]
    fn what_another_thread_computes_does_not_pile_up() {
        let _alone = ALONE.lock();
        let _guard = TrainingGuard::enter::<Flex>();
        let kept = Arc::new(());
        scope(|scope| {
            scope.spawn(|| {
                for _ in 0..1_000 {
                    let _turn = wait_for_turn::<Flex>();
                    hold(0, kept.clone());
                }
            });
        });
        assert!(Arc::strong_count(&kept) <= MOST_LEFT + 1);
    }

    #[test]
    fn threads_of_rayon_do_not_wait() {
        let _alone = ALONE.lock();
        let guard = TrainingGuard::enter::<Flex>();
        let started = Instant::now();
        guard.alone(|| {
            rayon::scope(|scope| scope.spawn(|_| drop(wait_for_turn::<Flex>())));
        });
        assert!(started.elapsed() < PATIENCE, "it goes on at once");
    }
}
