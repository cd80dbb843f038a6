//! Tensors that other threads use while some train: their ends are left to those that do.
//!
//! burn's fusion counts the owners of a tensor and decides by the count whether an operation is the last to use it. An
//! operation lets go of its inputs before it is in the queue. If another thread lets go of the same tensor in between,
//! that thread is the last owner, and notes the end of the tensor in the queue before the operation that still needs it:
//! `Should have handle for tensor`, in the thread of the device. burn's checkpointer reads parameters on a thread of its
//! own while training goes on, and so do metrics.
//!
//! While a [`TrainingGuard`] lives, the other threads hold what they use until the call is done, and then leave it here.
//! A training thread lets go of it between two of its own calls, and another one between two of theirs where much is left.
//! Either has the turn at the queue meanwhile, so that nobody is in the middle of an operation; several Learners in a process share
//! one turn.

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use burn_backend::Backend;
use parking_lot::{Mutex, MutexGuard, RwLock};

/// How many training threads there are, and the backend of each.
static TRAINING: AtomicUsize = AtomicUsize::new(0);
static BACKENDS: RwLock<Vec<TypeId>> = RwLock::new(Vec::new());
static LEFT: Mutex<Vec<(u64, Left)>> = Mutex::new(Vec::new());
/// What recordings before this one have made and others have left may end.
static DONE_BEFORE: AtomicU64 = AtomicU64::new(u64::MAX);

/// How many tensors may be left before another thread lets go of them: what a metric computes must not pile up behind a long step.
const MOST_LEFT: usize = 64;

/// How long a training thread may have the turn and queue nothing before others go on without: it may wait for one of them.
const PATIENCE: Duration = Duration::from_secs(10);

thread_local! {
    /// How many guards this thread has.
    static GUARDS: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread has the turn.
    static HAS_TURN: Cell<bool> = const { Cell::new(false) };
    /// What the call that this thread is making uses.
    static USED: RefCell<Vec<(u64, Left)>> = const { RefCell::new(Vec::new()) };
}

type Left = Box<dyn Any + Send>;

/// Makes the calling thread one that trains, until it is dropped: what other threads have used ends in its turn at the queue.
///
/// For backends that queue operations and count the owners of tensors, as burn's fusion does; others need it not, and tensors
/// would only live longer.
#[derive(Debug)]
pub struct TrainingGuard {
    backend: TypeId,
    /// Stays on its thread.
    thread: PhantomData<*const ()>,
}

impl TrainingGuard {
    /// Makes this thread one that trains on `Lazy<B>`.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter::<burn::backend::Flex>();
    /// guard.collect();
    /// ```
    pub fn enter<B: Backend>() -> Self {
        let backend = TypeId::of::<B>();
        GUARDS.set(GUARDS.get() + 1);
        BACKENDS.write().push(backend);
        TRAINING.fetch_add(1, Ordering::Relaxed);
        Self { backend, thread: PhantomData }
    }

    /// Runs `work`, which queues operations, while no other thread gets at the queue.
    ///
    /// A thread that reads a tensor has burn's fusion run what is queued on the tensor's stream. In the middle of a step that
    /// would cut operations apart that are otherwise run as one, by chance, and with them the memory that they need. So
    /// other threads wait meanwhile; `work` should leave the queue empty, and must not wait for them. The run of a recording
    /// has its queue for itself without this. Threads of rayon do not wait, as `work` may wait for them, and after ten seconds in which
    /// `work` has called nothing, neither do others.
    ///
    /// ```
    /// let guard = firebox_lazy::TrainingGuard::enter::<burn::backend::Flex>();
    /// assert_eq!(guard.alone(|| 1 + 1), 2);
    /// ```
    pub fn alone<R>(&self, work: impl FnOnce() -> R) -> R {
        let _turn = TrainingTurn::take();
        work()
    }

    /// Says that the other threads are done with what the recordings before this one have made, [`latest_recording`](crate::latest_recording) of its time. What this
    /// one and later ones make ends only once this is said of them, however early the others let go of it: when the memory of a step's
    /// outputs is free is no race then. As long as nothing is said, all ends as it comes.
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

    /// Lets go of the tensors that other threads have left so far. Outside a recording.
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
        let mut backends = BACKENDS.write();
        let own = backends.iter().position(|backend| *backend == self.backend);
        own.map(|own| backends.swap_remove(own));
        drop(backends);
        // What was left in between, by those who still saw this thread train.
        if TRAINING.load(Ordering::Relaxed) == 0 {
            DONE_BEFORE.store(u64::MAX, Ordering::Relaxed);
            collect();
        }
    }
}

/// Lets go of what was left and may end: with the turn, or where nobody trains any more.
fn collect() {
    let done = DONE_BEFORE.load(Ordering::Relaxed);
    let ended: Vec<_> = LEFT.lock().extract_if(.., |(recording, _)| *recording < done).collect();
    drop(ended);
}

/// Held by whoever queues operations, while there is a training thread.
static TURN: Mutex<()> = Mutex::new(());
/// How many calls training threads have made.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// How many these were when one of them was found to wait, with the turn.
static WAITS: AtomicU64 = AtomicU64::new(u64::MAX);

/// Notes that a training thread makes a call.
pub(crate) fn tick() {
    CALLS.fetch_add(1, Ordering::Relaxed);
}

/// The turn of the training thread.
pub(crate) struct TrainingTurn {
    _turn: MutexGuard<'static, ()>,
}

impl TrainingTurn {
    /// Takes the turn, if this is a training thread and has not taken it before. None as well where another one has it for so long that it
    /// may wait for this one.
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

/// What another thread than those that train has while it makes a call: the turn, if it need not go on without.
pub(crate) struct TheirTurn(Option<MutexGuard<'static, ()>>);

/// Waits until no training thread has the turn, if this is another thread.
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
    // A training thread may wait for rayon's, as for an optimizer that uses them.
    match rayon::current_thread_index() {
        Some(_) => TURN.try_lock(),
        None => patient_turn(),
    }
}

/// The turn, unless whoever has it has made no call for long.
fn patient_turn() -> Option<MutexGuard<'static, ()>> {
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
    /// Leaves what the call has used.
    fn drop(&mut self) {
        drop(Held(USED.take()));
        let is_over = TRAINING.load(Ordering::Relaxed) == 0;
        if is_over || self.0.is_some() && LEFT.lock().len() > MOST_LEFT {
            collect();
        }
        HAS_TURN.set(false);
    }
}

/// Whether tensors of the backend are to be left to another thread.
#[inline]
pub(crate) fn is_elsewhere<B: Backend>() -> bool {
    TRAINING.load(Ordering::Relaxed) > 0 && is_other_thread(TypeId::of::<B>())
}

#[cold]
fn is_other_thread(backend: TypeId) -> bool {
    // A thread that ends has no such values any more, and is not a training thread, which outlives its guard.
    let trains = GUARDS.try_with(Cell::get).is_ok_and(|guards| guards > 0);
    if trains {
        tick();
    }
    !trains && BACKENDS.read().contains(&backend)
}

/// Leaves a tensor to the training thread, which a recording of this number has made, or none.
pub(crate) fn leave(recording: u64, tensor: impl Any + Send) {
    LEFT.lock().push((recording, Box::new(tensor)));
}

/// Holds a tensor, which a recording of this number has made, or none, until the call that this thread is making is done.
pub(crate) fn hold(recording: u64, tensor: impl Any + Send) {
    USED.with_borrow_mut(|used| used.push((recording, Box::new(tensor))));
}

/// What a call uses; it is left to the training thread when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<(u64, Left)>);

impl Held {
    /// What this thread holds for the call that it is about to make.
    #[inline]
    pub(crate) fn take<B: Backend>() -> Self {
        match is_elsewhere::<B>() {
            true => Self(USED.take()),
            false => Self::default(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.0.is_empty() {
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

    /// Training threads of other tests have a turn, and let go of what is left.
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
            drop(Held::take::<Flex>());
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
