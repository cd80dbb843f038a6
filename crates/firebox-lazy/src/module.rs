//! Records a step of a model without changing the model.
//!
//! Three things of a burn module outlive a recorded step that never runs: parameters initialized by
//! the step, running statistics, which clones of a module share, and updates of these statistics
//! that are still pending for the thread. [`rehearse`] takes care of all three.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};
use burn_backend::Backend;
use firebox_trace::Trace;

use crate::backend::LazyBackend;
use crate::record::recorder::{RecordError, StepRecorder};
use crate::record::recording::{Discarded, Survivor};
use crate::record::rehearsing::rehearsing;
use crate::states::SavedStates;

/// Initializes every parameter of a module in place, in the order of the module's fields.
///
/// burn initializes a parameter when it is first used. A clone made before that gets values of its
/// own. After this call all clones share the same values.
///
/// ```
/// use burn::backend::Flex;
/// use burn::nn::{Linear, LinearConfig};
/// use firebox_lazy::{Lazy, initialize};
///
/// let layer: Linear<Lazy<Flex>> = LinearConfig::new(2, 3).init(&Default::default());
/// initialize(&layer);
/// layer.clone().weight.val().into_data().assert_eq(&layer.weight.val().into_data(), true);
/// ```
pub fn initialize<B: Backend, M: Module<B>>(module: &M) {
    struct Initialize;

    impl<B: Backend> ModuleVisitor<B> for Initialize {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            param.val();
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            param.val();
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            param.val();
        }
    }

    module.visit(&mut Initialize);
}

/// Frees the graphs of a module that nobody can run backwards any more.
///
/// If the result of a forward pass is detached or never used in a loss, its activations stay with
/// automatic differentiation. They are freed at the next backward pass that reaches the same
/// parameters. If there is none, every step adds to them, for example with a frozen encoder, or
/// with the generator while a discriminator learns.
///
/// The Learner calls this after each micro-step. In a loop of your own, call it after such a
/// forward pass. It computes nothing, and graphs that are still held somewhere stay.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Lazy, forget_graphs};
///
/// type B = Autodiff<Lazy<Flex>>;
/// let device = Default::default();
/// let encoder: Linear<B> = LinearConfig::new(4, 4).init(&device);
/// let features: Tensor<B, 2> = encoder.forward(Tensor::ones([2, 4], &device)).detach();
/// forget_graphs::<B, _>(&encoder);
/// # drop(features);
/// ```
pub fn forget_graphs<B: LazyBackend, M: Module<B>>(module: &M) {
    struct Leaves<B: Backend>(Vec<B::FloatTensorPrimitive>);

    impl<B: Backend> ModuleVisitor<B> for Leaves<B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if param.is_require_grad() {
                self.0.push(param.val().into_primitive().tensor());
            }
        }
    }

    let Some(device) = module.devices().into_iter().next() else { return };
    let mut leaves = Leaves::<B>(Vec::new());
    module.visit(&mut leaves);
    B::forget_graphs(&device, leaves.0);
}

/// Records what `program` does with `module`, and discards the recording.
///
/// Afterwards the module's parameters, its running statistics and the backend's random state are
/// bit for bit what they were, even if `program` panics. For a program that reads values, set
/// [`StepRecorder::substitute_random`]. Clones of `module` share its running statistics and must
/// not be in use on other threads meanwhile.
///
/// Tensors that `program` stored elsewhere are reported as [`Discarded::survivors`] and stay
/// without values. Exception: states that the thread [keeps](crate::HiddenStates::kept) are
/// restored.
///
/// # Errors
///
/// As [`StepRecorder::record`].
///
/// # Panics
///
/// If `program` panics.
///
/// ```
/// use burn::backend::Flex;
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::Tensor;
/// use firebox_lazy::{Lazy, StepRecorder, rehearse};
///
/// let device = Default::default();
/// let norm: BatchNorm<Lazy<Flex>> = BatchNormConfig::new(4).init(&device);
/// let rehearsal = rehearse::<Lazy<Flex>, _>(&StepRecorder::new(), &norm, |norm| {
///     // 16 MiB that are never allocated.
///     norm.forward(Tensor::<Lazy<Flex>, 2>::ones([1 << 20, 4], &device));
/// })?;
/// assert!(rehearsal.trace.calls().count() > 0);
/// assert!(rehearsal.survivors.is_empty());
/// # Ok::<(), firebox_lazy::RecordError>(())
/// ```
pub fn rehearse<B: LazyBackend, M: Module<B>>(
    recorder: &StepRecorder,
    module: &M,
    program: impl FnOnce(&M),
) -> Result<Rehearsal, RecordError> {
    initialize(module);
    let never_runs = recorder.refuse_reads || recorder.never_runs;
    let recorder = &StepRecorder { never_runs, ..recorder.clone() };
    let snapshot = module.clone().into_record();
    let states = SavedStates::save();
    let program = || rehearsing(|| program(module));
    let recorded = catch_unwind(AssertUnwindSafe(|| recorder.record::<B::Base, _>(program)));
    states.restore();
    let replaced = restore(module, snapshot)?;
    // The module's own leaves are not passed: a backward pass removes those it reaches from burn's
    // graph.
    if let Some(device) = module.devices().first() {
        B::forget_graphs(device, Vec::new());
    }
    match recorded {
        Ok(recording) => {
            let Discarded { trace, survivors } = recording?.discard();
            Ok(Rehearsal { trace, survivors, replaced })
        }
        Err(panic) => resume_unwind(panic),
    }
}

/// The result of a rehearsal.
#[derive(Clone, Debug)]
pub struct Rehearsal {
    /// The trace.
    pub trace: Trace,
    /// Tensors of the recording that somebody outside the module still holds.
    pub survivors: Vec<Survivor>,
    /// The paths of the module's tensors that the program replaced in place: running statistics.
    pub replaced: Vec<String>,
}

/// Restores the running statistics of a module from `snapshot`, a record of the same module. Works
/// even if they are tensors of a discarded or failed recording. Returns the paths of those that
/// are.
///
/// # Errors
///
/// [`RecordError::Nested`] inside a recording.
pub fn restore<B: LazyBackend, M: Module<B>>(
    module: &M,
    snapshot: M::Record,
) -> Result<Vec<String>, RecordError> {
    let mut replaced = Lost { path: Vec::new(), found: Vec::new() };
    let salvage = StepRecorder::salvage().record::<B::Base, _>(|| {
        // Making a record drains the updates that are pending for this thread. That computes on
        // tensors that may have no values, so all of this is a recording that never runs.
        drop(module.clone().into_record());
        module.visit(&mut replaced);
        drop(module.clone().load_record(snapshot));
    })?;
    salvage.discard();
    Ok(replaced.found)
}

/// Finds the tensors of a module that have no values.
struct Lost {
    path: Vec<String>,
    found: Vec<String>,
}

impl Lost {
    fn note(&mut self, lost: bool) {
        if lost {
            self.found.push(self.path.join("."));
        }
    }
}

impl<B: LazyBackend> ModuleVisitor<B> for Lost {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let TensorPrimitive::Float(tensor) = param.val().into_primitive() {
            self.note(B::lazy_float(&tensor).is_promise());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.note(B::lazy_int(&param.val().into_primitive()).is_promise());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.note(B::lazy_bool(&param.val().into_primitive()).is_promise());
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}
