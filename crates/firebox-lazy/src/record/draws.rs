//! Random numbers for recordings that leave the backend's generator alone.
//!
//! A planned step must not touch that generator. If it reads a value, the draws before the read
//! come from here instead. They have other values but the same distribution, which is all that
//! planning needs. If recordings are compared with each other, every draw is one fixed number and
//! recorded as such. A part of a batch then draws what the whole batch draws for it.

use burn_backend::{Distribution, TensorData};
use burn_std::{DType, Shape};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Where a recording draws its random numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Draws {
    #[default]
    Backend,
    /// From a generator of the recording's own.
    Substitute,
    /// Each draw is one fixed number of its distribution.
    Fixed,
}

/// Replaces the backend's generator.
pub(crate) struct Generator(Box<StdRng>);

impl Generator {
    /// The generator for `draws`. `None` if the backend's own is used.
    pub(crate) fn of(draws: Draws) -> Option<Self> {
        match draws {
            Draws::Backend | Draws::Fixed => None,
            Draws::Substitute => Some(Self::seeded(0)),
        }
    }

    fn seeded(seed: u64) -> Self {
        Self(Box::new(StdRng::seed_from_u64(seed)))
    }

    /// Restarts the generator from `seed`.
    pub(crate) fn seed(&mut self, seed: u64) {
        *self = Self::seeded(seed);
    }

    /// `shape` numbers of `distribution`, on the host.
    pub(crate) fn draw(
        &mut self,
        shape: &Shape,
        distribution: Distribution,
        dtype: DType,
    ) -> TensorData {
        TensorData::random::<f32, _, _>(shape.clone(), distribution, &mut self.0)
            .convert_dtype(dtype)
    }
}

/// The number that stands for a distribution in
/// [`StepRecorder::fixed_draws`](crate::StepRecorder::fixed_draws).
///
/// - Bernoulli: the probability, with which a dropout passes its input on. For integer masks it is
///   rounded up, so that everything passes.
/// - Uniform: the middle. For the default distribution, 0.5.
/// - Normal: one deviation above the mean.
pub(crate) fn fixed_draw(distribution: Distribution, dtype: DType) -> f32 {
    let number = match distribution {
        Distribution::Default => 0.5,
        Distribution::Bernoulli(probability) if dtype.is_float() => probability,
        Distribution::Bernoulli(probability) => probability.ceil(),
        Distribution::Uniform(low, high) => f64::midpoint(low, high),
        Distribution::Normal(mean, deviation) => mean + deviation,
    };
    number as f32
}
