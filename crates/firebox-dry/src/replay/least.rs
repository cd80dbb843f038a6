//! What a trace needs at least, from its tensors alone: an answer where a replay would be long, or
//! where CubeCL would panic. `model.rs` asks before each replay.
//!
//! burn's fusion never makes a tensor that only fused operations use, and runs operations later
//! than the program asks for them. It fuses nothing across a *fence*: a product of matrices, an
//! operation of a module such as a convolution, or a mark at which its queue is emptied. So a
//! tensor is only counted from the second fence after the call that makes it, up to the last fence
//! before its end. A convolution or a pooling has its operands in memory while it runs. Views and
//! casts of the same size share a buffer; other views do not count.

use burn_ir::OperationIr;
use firebox_trace::{Bytes, Call, Mark, OpIndex, Origin, Step, TensorIndex, Trace};

use crate::replay::translate::Types;

/// Which tensors count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// Those of the trace as it is.
    AsRecorded,
    /// Those that are also there if others are dropped and recomputed: what existed before,
    /// what is uploaded, and operands while they are used.
    Recomputed,
}

/// The bytes that are certainly needed at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Least {
    pub(crate) bytes: Bytes,
    pub(crate) at: OpIndex,
}

/// The most bytes that are certainly in memory at once.
pub(crate) fn least(trace: &Trace, types: &Types, counted: Counted) -> Least {
    let mut spans = Spans::begin(trace, types, counted);
    for (at, step) in trace.iter() {
        spans.step(at, step);
    }
    spans.most()
}

/// What a step is to burn's fusion.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It may be fused with others.
    Fusible,
    Fence,
    /// A fence whose operands are in memory at once.
    Solid,
}

impl Kind {
    fn of(trace: &Trace, step: &Step) -> Self {
        match step {
            Step::Mark(Mark::Settle | Mark::Drain) => Self::Fence,
            Step::Call(call) => Self::of_call(trace, call),
            _ => Self::Fusible,
        }
    }

    fn of_call(trace: &Trace, call: &Call) -> Self {
        let operations = &trace.description(call).operations;
        let is_solid = call.name.contains("conv") || call.name.contains("pool");
        match operations.as_slice() {
            [OperationIr::Module(_)] if is_solid => Self::Solid,
            all if all.iter().any(|one| matches!(one, OperationIr::Module(_))) => Self::Fence,
            _ if call.name.ends_with("matmul") => Self::Fence,
            _ => Self::Fusible,
        }
    }
}

/// The fences between which a buffer is certainly in memory: from the first, up to before the
/// second.
#[derive(Clone, Copy, Default)]
struct Span {
    from: usize,
    to: usize,
    /// How many tensors lie on the buffer.
    holders: usize,
}

struct Spans<'a> {
    trace: &'a Trace,
    types: &'a Types,
    counted: Counted,
    /// The tensor that owns the buffer of each tensor. `None` if it may have none of its own.
    owners: Vec<Option<usize>>,
    /// By owner.
    spans: Vec<Span>,
    fences: Vec<OpIndex>,
    /// What is in memory at each fence besides buffers with a span that counts.
    operands: Vec<Bytes>,
    existing: Bytes,
}

impl<'a> Spans<'a> {
    fn begin(trace: &'a Trace, types: &'a Types, counted: Counted) -> Self {
        let mut spans = vec![Span::default(); trace.tensors.len()];
        let mut existing = Bytes::ZERO;
        for tensor in trace.existing() {
            spans[tensor.0 as usize].holders = 1;
            existing += types.bytes(trace.tensor(tensor));
        }
        let owners = owners(trace, types);
        let (fences, operands) = (Vec::new(), Vec::new());
        Self { trace, types, counted, owners, spans, fences, operands, existing }
    }

    fn owner(&self, tensor: TensorIndex) -> Option<usize> {
        self.owners[tensor.0 as usize]
    }

    fn bytes(&self, owner: usize) -> Bytes {
        self.types.bytes(&self.trace.tensors[owner])
    }

    /// Whether the span of a buffer counts, or only its uses do.
    fn counts(&self, owner: usize) -> bool {
        self.counted == Counted::AsRecorded
            || match self.trace.tensors[owner].origin {
                Origin::Existing => true,
                Origin::Made(at) => {
                    matches!(self.trace.steps[at.0 as usize], Step::Upload { .. })
                }
            }
    }

    fn step(&mut self, at: OpIndex, step: &Step) {
        let kind = Kind::of(self.trace, step);
        let fence = self.fences.len();
        if kind != Kind::Fusible {
            self.fences.push(at);
            self.operands.push(Bytes::ZERO);
        }
        let from = match (kind, step) {
            (Kind::Solid, _) | (_, Step::Upload { .. }) => fence,
            (Kind::Fence, _) => fence + 2,
            (Kind::Fusible, _) => fence + 1,
        };
        let (ends, begins) = step.deaths_and_births();
        for tensor in begins {
            let Some(owner) = self.owner(tensor) else { continue };
            let span = &mut self.spans[owner];
            if span.holders == 0 {
                span.from = from;
            }
            span.holders += 1;
        }
        if let (Kind::Solid, Step::Call(call)) = (kind, step) {
            self.hold(call, fence);
        }
        for tensor in ends {
            let Some(owner) = self.owner(tensor) else { continue };
            let span = &mut self.spans[owner];
            span.holders = span.holders.saturating_sub(1);
            if span.holders == 0 {
                span.to = fence + usize::from(kind == Kind::Solid);
            }
        }
    }

    /// The operands of a call are in memory while it runs.
    fn hold(&mut self, call: &Call, fence: usize) {
        let inputs = call.inputs.iter().map(|input| input.tensor);
        let operands = inputs.chain(call.outputs.iter().copied());
        let mut owners: Vec<usize> = operands.filter_map(|tensor| self.owner(tensor)).collect();
        owners.sort_unstable();
        owners.dedup();
        for owner in owners {
            self.spans[owner].from = self.spans[owner].from.min(fence);
            if !self.counts(owner) {
                let bytes = self.bytes(owner);
                self.operands[fence] += bytes;
            }
        }
    }

    fn most(self) -> Least {
        let mut grown = vec![(Bytes::ZERO, Bytes::ZERO); self.fences.len() + 1];
        for (owner, span) in self.spans.iter().enumerate() {
            let to = if span.holders > 0 { self.fences.len() } else { span.to };
            if self.owners[owner] == Some(owner) && self.counts(owner) && span.from < to {
                grown[span.from].0 += self.bytes(owner);
                grown[to].1 += self.bytes(owner);
            }
        }
        let mut most = Least { bytes: self.existing, at: OpIndex(0) };
        let mut held = Bytes::ZERO;
        for ((at, operands), (more, less)) in self.fences.iter().zip(&self.operands).zip(grown) {
            held = held + more - less;
            let bytes = held + *operands;
            if bytes > most.bytes {
                most = Least { bytes, at: *at };
            }
        }
        most
    }
}

/// The owners of the tensors' buffers. A view or a cast shares its input's buffer if it has as many
/// bytes. Otherwise it may be a copy, or a buffer that is never made.
fn owners(trace: &Trace, types: &Types) -> Vec<Option<usize>> {
    let mut owners: Vec<Option<usize>> = (0..trace.tensors.len()).map(Some).collect();
    let bytes = |tensor: TensorIndex| types.bytes(trace.tensor(tensor));
    for (_, call) in trace.calls() {
        let may_share = call.is_view() || call.name.ends_with("cast");
        if let ([input, ..], [output]) = (&call.inputs[..], &call.outputs[..])
            && may_share
        {
            let is_same = bytes(input.tensor) == bytes(*output);
            owners[output.0 as usize] = owners[input.tensor.0 as usize].filter(|_| is_same);
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::tensor::Tensor;
    use burn::tensor::module::conv2d;
    use burn::tensor::ops::ConvOptions;
    use burn_std::BoolStore;
    use firebox_lazy::{Lazy, StepRecorder};

    use super::*;

    type T<const D: usize> = Tensor<Lazy<Flex>, D>;

    #[track_caller]
    fn check<R>(program: impl FnOnce() -> R, as_recorded: Bytes, recomputed: Bytes) {
        let recording = StepRecorder::new().record::<Flex, _>(program).expect("nothing is read");
        let trace = recording.discard().trace;
        let types = Types { bools: BoolStore::U8, instead: Vec::new() };
        let found = [Counted::AsRecorded, Counted::Recomputed]
            .map(|counted| least(&trace, &types, counted).bytes);
        assert_eq!(found, [as_recorded, recomputed]);
    }

    /// A square of one MiB.
    fn square() -> T<2> {
        Tensor::ones([512, 512], &Default::default())
    }

    #[test]
    fn what_may_be_fused_away_is_not_counted() {
        let input = square();
        check(|| ((input.clone() + 1.0).exp() * 2.0).log(), Bytes::mib(1), Bytes::mib(1));
    }

    #[test]
    fn what_is_kept_past_two_products_is_counted_unless_it_is_computed_again() {
        let input = square();
        let chain = || {
            let kept = input.clone().exp();
            let one = kept.clone().matmul(input.clone());
            let other = one.clone().matmul(input.clone());
            other.matmul(kept)
        };
        // At the second product: the input, and the exponentials.
        check(chain, Bytes::mib(2), Bytes::mib(1));
    }

    #[test]
    fn a_convolution_has_its_operands() {
        let image = || T::<4>::ones([1, 1, 512, 512], &Default::default());
        let (input, weight) = (image(), T::<4>::ones([1, 1, 1, 1], &Default::default()));
        let options = || ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let program = || conv2d(input.clone().exp(), weight.clone(), None, options());
        // The input that existed, its exponentials, the result, and a weight of four bytes.
        let bytes = Bytes::mib(3) + Bytes::new(4);
        check(program, bytes, bytes);
    }

    #[test]
    fn a_trace_without_steps_needs_what_existed() {
        let _input = square();
        check(|| {}, Bytes::ZERO, Bytes::ZERO);
    }
}
