//! How losses of items become the loss of a batch, and what that makes of the gradients of parts.

/// How the loss of a batch is computed from the losses of its items. It determines how gradients of
/// micro-batches add up. The Learner finds it in the recorded step, where that shows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossReduction {
    /// The loss is a mean over the items, or over what the batch's weight counts.
    #[default]
    Mean,
    /// The loss is a sum over the items. A term that occurs once per batch, such as a penalty,
    /// counts once where the recorded step shows it. Multiply it by the
    /// [share of the batch](crate::batch_share) elsewhere: where several ranks share a step, or the
    /// step reads values.
    Sum,
}

impl LossReduction {
    /// The factor for the gradient of a micro-batch of this weight. `None` if nothing in it counts:
    /// its mean is over nothing and therefore not a number.
    pub(crate) fn scale(self, weight: f64, reference: f64) -> Option<f64> {
        match self {
            Self::Sum => Some(1.0),
            Self::Mean if weight == 0.0 => None,
            Self::Mean => Some(weight / reference),
        }
    }

    /// Whether a micro-batch of this weight has a loss.
    pub(crate) fn counts(self, weight: f64) -> bool {
        self.scale(weight, 1.0).is_some()
    }

    /// The final factor for a sum of gradients relative to `reference`, whose summands weigh
    /// `weight` in total. It is one if the two differ only by rounding, as a sum over parts does. A
    /// batch that is run whole is therefore trained on unchanged.
    pub(crate) fn rest(self, reference: f64, weight: f64) -> f64 {
        let rest = reference / weight;
        let is_one = self == Self::Sum || (rest - 1.0).abs() < f64::from(f32::EPSILON);
        if is_one { 1.0 } else { rest }
    }
}
