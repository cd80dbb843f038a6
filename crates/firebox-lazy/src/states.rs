//! State that steps keep outside the module: saved before a rehearsal, restored after it.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, RwLock};

/// Something that a step keeps between its calls outside the module's parameters and running
/// statistics, for example a cache, a carried hidden state, or a moving average.
///
/// A step is rehearsed on tensors that never get values. What the rehearsal stored somewhere must
/// be undone, and this trait says how. It is implemented for `Arc<Mutex<T>>` and `Arc<RwLock<T>>`
/// if `T` can be cloned, even if a panicking step has poisoned them.
///
/// ```
/// use std::sync::{Arc, Mutex};
///
/// use burn::backend::Flex;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use firebox_lazy::{HiddenStates, Lazy, StepRecorder, rehearse};
///
/// type B = Lazy<Flex>;
/// let device = Default::default();
/// let layer: Linear<B> = LinearConfig::new(2, 2).init(&device);
/// let average = Arc::new(Mutex::new(Tensor::<B, 2>::zeros([1, 2], &device)));
/// let step = |layer: &Linear<B>| {
///     let mut average = average.lock().unwrap();
///     *average = average.clone() * 0.9 + layer.forward(Tensor::ones([1, 2], &device)) * 0.1;
/// };
/// let states = HiddenStates::default().with(average.clone());
/// let rehearsal = states.kept(|| rehearse::<B, _>(&StepRecorder::new(), &layer, step))?;
/// assert!(rehearsal.survivors.is_empty());
/// assert_eq!(average.lock().unwrap().to_data().to_vec::<f32>().unwrap(), [0.0, 0.0]);
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
pub trait HiddenState: Send + Sync + 'static {
    /// The saved state.
    type Saved: 'static;

    /// Saves the current state.
    fn save(&self) -> Self::Saved;

    /// Restores a saved state.
    fn restore(&self, saved: Self::Saved);
}

impl<T: Clone + Send + 'static> HiddenState for Arc<Mutex<T>> {
    type Saved = T;

    fn save(&self) -> T {
        self.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn restore(&self, saved: T) {
        self.clear_poison();
        *self.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = saved;
    }
}

impl<T: Clone + Send + Sync + 'static> HiddenState for Arc<RwLock<T>> {
    type Saved = T;

    fn save(&self) -> T {
        self.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn restore(&self, saved: T) {
        self.clear_poison();
        *self.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = saved;
    }
}

/// Saves a state and returns the function that restores it.
type Save = Arc<dyn Fn() -> Box<dyn FnOnce()> + Send + Sync>;

/// The [`HiddenState`]s of a step.
#[derive(Clone, Default)]
pub struct HiddenStates(Vec<Save>);

impl std::fmt::Debug for HiddenStates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HiddenStates({})", self.0.len())
    }
}

thread_local! {
    static KEPT: RefCell<HiddenStates> = RefCell::default();
}

impl HiddenStates {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a state.
    #[must_use]
    pub fn with(mut self, state: impl HiddenState) -> Self {
        let state = Arc::new(state);
        self.0.push(Arc::new(move || {
            let (state, saved) = (state.clone(), state.save());
            Box::new(move || state.restore(saved))
        }));
        self
    }

    /// Runs `program`. Rehearsals of this thread in it restore these states, and no others.
    pub fn kept<R>(&self, program: impl FnOnce() -> R) -> R {
        struct Before(HiddenStates);

        impl Drop for Before {
            fn drop(&mut self) {
                KEPT.replace(std::mem::take(&mut self.0));
            }
        }

        let _before = Before(KEPT.replace(self.clone()));
        program()
    }
}

/// Saved states.
#[must_use = "what is saved is to be given back, or dropped on purpose"]
pub struct SavedStates(Vec<Box<dyn FnOnce()>>);

impl SavedStates {
    /// Saves the states that this thread [keeps](HiddenStates::kept).
    pub fn save() -> Self {
        let states = KEPT.with_borrow(|states| states.0.clone());
        Self(states.iter().map(|save| save()).collect())
    }

    /// Restores the states.
    pub fn restore(self) {
        self.0.into_iter().for_each(|restore| restore());
    }
}
