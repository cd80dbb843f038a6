//! Scales losses where gradients would vanish in 16 bit, and unscales gradients. Each micro-step
//! runs inside [`with_scale`].
//!
//! Half floats hold nothing below 6e-8. With a loss that is some thousand times as large, so are
//! all gradients in the backward pass; divided by the same number in 32 bit, they are those of the
//! loss. As large a scale as gradients allow is found by trial: Micikevicius et al., "Mixed
//! Precision Training", 2018, section 3.2.

use std::cell::Cell;

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use firebox_lazy::LazyBackend;

use crate::error::TrainError;
use crate::reduction::LossReduction;
use crate::share::batch_share;

thread_local! {
    /// The scale of the running step. None if losses are not scaled.
    static SCALE: Cell<Option<f64>> = const { Cell::new(None) };
    /// Whether the step has asked for it.
    static IS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// The scale with which training begins.
const FIRST: f64 = 65_536.0;

/// The largest number that half floats hold.
const LARGEST: f64 = 65_504.0;

/// After so many optimizer steps in a row with finite gradients, the scale is doubled.
const PATIENCE: u32 = 2000;

/// The loss times the scale of the running step, for its backward pass.
///
/// For training in half floats, `Autodiff<Half<Lazy<B>, f16>>`, in which gradients would vanish
/// otherwise. The Learner divides the gradients by the scale, in 32 bit. If a gradient of an
/// optimizer step is not a number, or too large for half floats times the scale, the step is left
/// out and the scale is halved; after 2,000 steps in a row it is doubled. It begins with 65,536. A
/// step that is left out is none of the learning-rate schedule.
///
/// Under [`LossReduction::Mean`], the loss of a micro-batch is scaled by its share of the batch's
/// items, too, so that gradients within the step are as large as those of the whole batch. What is
/// left out then depends on a split by rounding only, as long as equally many items are equally
/// heavy.
///
/// Everywhere else, in another type and outside of the Learner's training steps, gives the loss
/// unchanged. So a model may always use it.
///
/// ```
/// use burn::prelude::*;
/// use burn::tensor::backend::AutodiffBackend;
/// use burn::train::{ClassificationOutput, TrainOutput};
/// # use burn::nn::Linear;
/// use firebox_train::scale_loss;
///
/// fn finish<B: AutodiffBackend>(
///     model: &Linear<B>,
///     output: ClassificationOutput<B>,
/// ) -> TrainOutput<ClassificationOutput<B>> {
///     let grads = scale_loss(output.loss.clone()).backward();
///     TrainOutput::new(model, grads, output)
/// }
/// ```
pub fn scale_loss<B: Backend, const D: usize>(loss: Tensor<B, D>) -> Tensor<B, D> {
    match SCALE.get() {
        Some(scale) => {
            IS_ASKED.set(true);
            loss.mul_scalar(scale)
        }
        None => loss,
    }
}

/// Runs a step whose loss is to be scaled. Also returns whether the step has done so.
pub(crate) fn with_scale<R>(scale: f64, step: impl FnOnce() -> R) -> (R, bool) {
    struct Before(Option<f64>, bool);

    impl Drop for Before {
        fn drop(&mut self) {
            SCALE.set(self.0);
            IS_ASKED.set(self.1);
        }
    }

    let _before = Before(SCALE.replace(Some(scale)), IS_ASKED.replace(false));
    let result = step();
    (result, IS_ASKED.get())
}

/// The scale of losses, which follows their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LossScale {
    scale: f64,
    /// Optimizer steps with finite gradients since the scale was last changed.
    clean: u32,
    /// Whether the latest step was left out, and whether any was made.
    left_out: bool,
    has_stepped: bool,
}

impl LossScale {
    /// For a backend that computes in half floats. None for others.
    pub(crate) fn of<B: LazyBackend>() -> Option<Self> {
        (B::narrow() == Some(DType::F16)).then_some(Self {
            scale: FIRST,
            clean: 0,
            left_out: false,
            has_stepped: false,
        })
    }

    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }

    /// Begins an optimizer step. One that has no gradient is not judged.
    pub(crate) fn begin_step(&mut self) {
        self.left_out = false;
    }

    pub(crate) fn has_left_out(&self) -> bool {
        self.left_out
    }

    pub(crate) fn has_stepped(&self) -> bool {
        self.has_stepped
    }

    /// Whether an optimizer step is made, given whether its gradients are finite.
    pub(crate) fn judge(&mut self, are_finite: bool) -> Judgement {
        let before = self.scale;
        if self.note(are_finite) {
            if are_finite {
                return Judgement::Made;
            }
            log::debug!(
                "gradients are not finite with losses times {before}: the step is left out"
            );
            return Judgement::LeftOut;
        }
        Judgement::Hopeless
    }

    /// The gradients of an optimizer step of this process alone, if it is made. Waits for the
    /// device.
    ///
    /// # Errors
    ///
    /// If they are too large for half floats, and a smaller scale would not help.
    pub(crate) fn judge_alone<B, M>(
        &mut self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<Option<GradientsParams>, TrainError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        // The sum over micro-batches is as large as the whole batch's gradient in half floats.
        match self.judge(are_within::<B, M>(model, &grads, LARGEST / self.scale)) {
            Judgement::Made => Ok(Some(grads)),
            Judgement::LeftOut => Ok(None),
            Judgement::Hopeless => Err(TrainError::NotFinite { parameter: None }),
        }
    }

    /// Takes note of an optimizer step, which is left out if its gradients are not finite. False if
    /// a smaller scale would not help.
    fn note(&mut self, are_finite: bool) -> bool {
        self.left_out = !are_finite;
        self.has_stepped |= are_finite;
        if are_finite {
            self.clean += 1;
            if self.clean >= PATIENCE {
                (self.scale, self.clean) = (2.0 * self.scale, 0);
            }
            return true;
        }
        let helps = self.scale > 1.0;
        (self.scale, self.clean) = ((self.scale / 2.0).max(1.0), 0);
        helps
    }
}

/// What becomes of an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    Made,
    LeftOut,
    /// Its gradients are not finite, and a smaller scale would not help.
    Hopeless,
}

/// How the losses of a batch's micro-steps are scaled.
pub(crate) struct Scaling {
    scale: Option<f64>,
    /// How many ranks share the share of a step, if its loss is scaled by that, too.
    ranks: Option<usize>,
    /// The scale of the latest step.
    latest: Cell<f64>,
    /// Whether a step has not scaled its loss.
    is_missing: Cell<bool>,
}

impl Scaling {
    pub(crate) fn with(scale: Option<LossScale>) -> Self {
        Self {
            scale: scale.map(|scale| scale.scale),
            ranks: None,
            latest: Cell::new(1.0),
            is_missing: Cell::new(false),
        }
    }

    /// Scales means by the share of their micro-batch, too.
    pub(crate) fn by_share(self, reduction: LossReduction, ranks: usize) -> Self {
        Self { ranks: (reduction == LossReduction::Mean).then_some(ranks), ..self }
    }

    /// Runs a step.
    pub(crate) fn step<R>(&self, step: impl FnOnce() -> R) -> R {
        let Some(scale) = self.scale else { return step() };
        let share = self.ranks.map_or(1.0, |ranks| batch_share() * ranks as f64);
        self.latest.set(scale * share);
        let (result, is_scaled) = with_scale(scale * share, step);
        self.is_missing.set(!is_scaled);
        result
    }

    /// The factor that undoes the scale of the latest step's gradients.
    ///
    /// # Errors
    ///
    /// If the step has not scaled its loss.
    pub(crate) fn undo(&self) -> Result<f64, TrainError> {
        match self.is_missing.get() {
            true => Err(TrainError::LossNotScaled),
            false => Ok(self.latest.get().recip()),
        }
    }
}

/// Two numbers that are finite if all gradients are: their sum, and the largest magnitude. None if
/// there are none.
pub(crate) fn witness<B, M>(
    model: &M,
    grads: &GradientsParams,
) -> Option<Tensor<B::InnerBackend, 1>>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    struct Sum<'a, B: AutodiffBackend> {
        grads: &'a GradientsParams,
        sum: Option<Tensor<B::InnerBackend, 1>>,
        magnitudes: Vec<Tensor<B::InnerBackend, 1>>,
    }

    impl<B: AutodiffBackend> ModuleVisitor<B> for Sum<'_, B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(grad) = self.grads.get::<B::InnerBackend, D>(param.id) else { return };
            let sum = grad.clone().sum();
            self.magnitudes.push(grad.max_abs());
            self.sum = Some(match self.sum.take() {
                Some(before) => before + sum,
                None => sum,
            });
        }
    }

    let mut sum = Sum::<B> { grads, sum: None, magnitudes: Vec::new() };
    model.visit(&mut sum);
    let Sum { sum, magnitudes, .. } = sum;
    sum.map(|sum| Tensor::cat(vec![sum, Tensor::cat(magnitudes, 0).max()], 0))
}

/// Whether all gradients are finite. Waits for the device.
pub(crate) fn are_finite<B, M>(model: &M, grads: &GradientsParams) -> bool
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    are_within::<B, M>(model, grads, f64::MAX)
}

/// Whether all gradients are numbers of at most this magnitude. Waits for the device.
fn are_within<B, M>(model: &M, grads: &GradientsParams, most: f64) -> bool
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let Some(witness) = witness::<B, M>(model, grads) else { return true };
    let numbers: Vec<f64> = witness.into_data().iter::<f64>().collect();
    numbers.iter().all(|number| number.is_finite())
        && numbers.last().is_none_or(|largest| *largest <= most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::with_share;

    #[test]
    fn the_scale_is_halved_and_doubled() {
        let mut scale = LossScale { scale: 4.0, clean: 0, left_out: false, has_stepped: false };
        assert!(scale.note(false) && scale.scale == 2.0);
        (1..PATIENCE).for_each(|_| assert!(scale.note(true)));
        assert_eq!(scale.scale, 2.0);
        assert!(scale.note(true) && scale.scale == 4.0);
        assert!(scale.note(false) && scale.note(false) && scale.scale == 1.0);
        assert!(!scale.note(false) && scale.scale == 1.0);
    }

    #[test]
    fn a_mean_is_scaled_by_its_share_of_the_batch() {
        let scale = LossScale { scale: 64.0, clean: 0, left_out: false, has_stepped: false };
        let scaled = |scaling: Scaling, share| {
            let step = || {
                IS_ASKED.set(true);
                SCALE.get()
            };
            let scale = with_share(share, || scaling.step(step));
            (scale, scaling.undo().expect("it has scaled"))
        };
        let mean = |ranks| Scaling::with(Some(scale)).by_share(LossReduction::Mean, ranks);
        assert_eq!(scaled(mean(1), 1.0), (Some(64.0), 1.0 / 64.0));
        assert_eq!(scaled(mean(1), 0.25), (Some(16.0), 1.0 / 16.0));
        assert_eq!(
            scaled(mean(2), 0.25),
            (Some(32.0), 1.0 / 32.0),
            "a quarter of two ranks' batch"
        );
        let sum = Scaling::with(Some(scale)).by_share(LossReduction::Sum, 1);
        assert_eq!(scaled(sum, 0.25), (Some(64.0), 1.0 / 64.0));
        let none = Scaling::with(None).by_share(LossReduction::Mean, 1);
        assert_eq!(none.undo().ok(), Some(1.0));
    }

    #[test]
    fn a_step_that_panics_leaves_no_scale() {
        let panics = || with_scale(8.0, || std::panic::resume_unwind(Box::new(())));
        assert!(std::panic::catch_unwind(panics).map(|((), _)| ()).is_err());
        assert_eq!(SCALE.get(), None);
    }
}
