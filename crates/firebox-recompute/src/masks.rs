//! Masks in a byte: tensors of zeros and ones that are kept for the backward pass, as floats.

use burn_backend::Distribution;
use burn_ir::{
    BoolOperationIr, CastOpIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr,
    ScalarOpIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::{BoolStore, DType, Shape};
use firebox_trace::{Call, Description, TensorIndex, Trace};

/// The method that packs a mask.
pub(crate) const PACK: &str = "float_greater_elem";
/// The method that unpacks it.
pub(crate) const UNPACK: &str = "bool_into_float";

/// What lies between zero and one.
const BETWEEN: f64 = 0.5;

/// Whether all values of a call's result are zero or one: draws of a Bernoulli distribution, such
/// as dropout's masks.
pub(crate) fn makes_mask(trace: &Trace, call: &Call) -> bool {
    match trace.description(call).operations.as_slice() {
        [OperationIr::Float(_, FloatOperationIr::Random(draw))] => {
            matches!(draw.distribution, Distribution::Bernoulli(_))
        }
        _ => false,
    }
}

/// A type of booleans that take a byte, among those of a trace. Masks can be packed in it.
pub(crate) fn bytes_of(trace: &Trace) -> Option<DType> {
    let mut dtypes = trace.tensors.iter().map(|tensor| tensor.dtype);
    dtypes.find(|dtype| is_byte(*dtype))
}

/// Whether each element of a boolean tensor takes a byte.
pub(crate) fn is_byte(dtype: DType) -> bool {
    matches!(dtype, DType::Bool(BoolStore::Native | BoolStore::U8))
}

/// The masks of a trace. A mask with views stays as it is.
pub(crate) fn masks(trace: &Trace, roots: &[TensorIndex]) -> Vec<usize> {
    let mut members = vec![0_u32; trace.tensors.len()];
    roots.iter().for_each(|root| members[root.0 as usize] += 1);
    let draws = trace.calls().filter(|(_, call)| makes_mask(trace, call));
    let masks = draws.flat_map(|(_, call)| &call.outputs).map(|tensor| tensor.0 as usize);
    masks.filter(|mask| members[*mask] == 1).collect()
}

/// What packing a mask does.
pub(crate) fn packs(trace: &Trace, mask: TensorIndex, packed: DType) -> Description {
    let info = trace.tensor(mask);
    let operation = NumericOperationIr::GreaterElem(ScalarOpIr {
        lhs: input(info.shape.clone(), info.dtype),
        rhs: ScalarIr::Float(BETWEEN),
        out: TensorIr::uninit(TensorId::new(1), info.shape.clone(), packed),
    });
    described(OperationIr::NumericFloat(info.dtype, operation))
}

/// What unpacking a mask does.
pub(crate) fn unpacks(trace: &Trace, mask: TensorIndex, packed: DType) -> Description {
    let info = trace.tensor(mask);
    let operation = BoolOperationIr::IntoFloat(CastOpIr {
        input: input(info.shape.clone(), packed),
        out: TensorIr::uninit(TensorId::new(1), info.shape.clone(), info.dtype),
    });
    described(OperationIr::Bool(operation))
}

fn input(shape: Shape, dtype: DType) -> TensorIr {
    TensorIr { id: TensorId::new(0), shape, status: TensorStatus::ReadWrite, dtype }
}

fn described(operation: OperationIr) -> Description {
    Description { operations: vec![operation], outputs: vec![1], workspace: None }
}

#[cfg(test)]
mod tests {
    use burn_ir::RandomOpIr;
    use firebox_trace::{
        Bytes, DescriptionIndex, OpIndex, Origin, Step, TensorInfo, TensorType, Use,
    };

    use super::*;
    use crate::recipe::{Rewritten, StepOrigin};
    use crate::{Demand, apply, check, select};

    const ELEMENTS: usize = 1 << 18;

    /// A mask that is used, kept while something large is made, and used again.
    fn trace(distribution: Distribution) -> Trace {
        let floats = |elements: usize, origin| {
            let ty = TensorType { shape: Shape::new([elements]), dtype: DType::F32 };
            TensorInfo::new(ty.into(), origin)
        };
        let bools = TensorType { shape: Shape::new([1]), dtype: DType::Bool(BoolStore::Native) };
        let made = |at: u32| Origin::Made(OpIndex(at));
        let tensors = vec![
            floats(ELEMENTS, Origin::Existing),
            TensorInfo::new(bools.into(), Origin::Existing),
            floats(ELEMENTS, made(0)),
            floats(1, made(1)),
            floats(4 * ELEMENTS, made(2)),
            floats(1, made(3)),
            floats(ELEMENTS, made(4)),
        ];
        let call = |name: &'static str, inputs: &[(u32, bool)], output: u32, description: u32| {
            let inputs = inputs
                .iter()
                .map(|(tensor, last)| Use { tensor: TensorIndex(*tensor), last: *last });
            Step::Call(Box::new(Call {
                name: name.into(),
                inputs: inputs.collect(),
                outputs: [TensorIndex(output)].into_iter().collect(),
                description: DescriptionIndex(description),
            }))
        };
        let out = TensorIr::uninit(TensorId::new(0), Shape::new([ELEMENTS]), DType::F32);
        let draw = FloatOperationIr::Random(RandomOpIr { out, distribution });
        let draws = Description {
            operations: vec![OperationIr::Float(DType::F32, draw)],
            outputs: vec![0],
            workspace: None,
        };
        let other = Description { outputs: vec![0], ..Description::default() };
        let steps = vec![
            call("float_random", &[], 2, 0),
            call("float_sum", &[(2, false)], 3, 1),
            call("float_repeat_dim", &[(0, false)], 4, 1),
            call("float_sum", &[(4, true)], 5, 1),
            call("float_mul", &[(0, false), (2, true)], 6, 1),
        ];
        let trace = Trace { tensors, steps, descriptions: vec![draws.into(), other.into()] };
        trace.check().expect("it is a trace");
        trace
    }

    fn within(trace: &Trace, floats: f64) -> Option<Rewritten> {
        let limit = Bytes::new((4.0 * floats * ELEMENTS as f64) as u64);
        let mut demand = Demand::of(vec![1.0; trace.steps.len()]);
        demand.per_byte = 1e-9;
        demand.bools = bytes_of(trace);
        let selected = select(trace, limit, &demand)?;
        let rewritten = apply(trace, &selected.recipe).expect("it is a recipe for this trace");
        check(trace, &rewritten).expect("values stay what they are");
        (selected.peak <= limit).then_some(rewritten)
    }

    fn places(rewritten: &Rewritten, of: StepOrigin) -> Vec<usize> {
        let origins = rewritten.origins.iter().enumerate();
        origins.filter(|(_, origin)| **origin == of).map(|(at, _)| at).collect()
    }

    #[test]
    fn a_mask_is_packed_where_there_is_no_room() {
        let trace = trace(Distribution::Bernoulli(0.9));
        let whole = within(&trace, 6.1).expect("all fits");
        assert_eq!(places(&whole, StepOrigin::Packed).len(), 0);
        let packed = within(&trace, 5.5).expect("a quarter of the mask fits");
        assert_eq!(places(&packed, StepOrigin::Packed).len(), 1);
        assert_eq!(places(&packed, StepOrigin::Unpacked).len(), 1);
        assert!(within(&trace, 5.2).is_none(), "it cannot be smaller");
        let uniform = self::trace(Distribution::Uniform(0.0, 1.0));
        assert!(within(&uniform, 5.5).is_none(), "other numbers are no mask");
    }

    #[test]
    fn mutants_of_packing_are_rejected() {
        let bernoulli = trace(Distribution::Bernoulli(0.9));
        let packed = within(&bernoulli, 5.5).expect("a quarter of the mask fits");
        let at = places(&packed, StepOrigin::Packed)[0];
        let back = places(&packed, StepOrigin::Unpacked)[0];
        let rejected = |change: &dyn Fn(&mut Rewritten)| {
            let mut mutant = packed.clone();
            change(&mut mutant);
            assert!(check(&bernoulli, &mutant).is_err());
        };
        let description = |mutant: &Rewritten, at: usize| match &mutant.trace.steps[at] {
            Step::Call(call) => call.description.0 as usize,
            _ => unreachable!("it is a call"),
        };
        // Another question is asked of each element.
        rejected(&|mutant| {
            let of = description(mutant, at);
            let OperationIr::NumericFloat(_, NumericOperationIr::GreaterElem(does)) =
                &mut std::sync::Arc::make_mut(&mut mutant.trace.descriptions[of]).operations[0]
            else {
                unreachable!("it packs")
            };
            does.rhs = ScalarIr::Float(1.0);
        });
        // The mask is kept next to its bytes.
        rejected(&|mutant| {
            let Step::Call(call) = &mut mutant.trace.steps[at] else { unreachable!() };
            call.inputs[0].last = false;
        });
        // What comes back has another operation.
        rejected(&|mutant| {
            let (of, other) = (description(mutant, back), description(mutant, at));
            mutant.trace.descriptions[of] = mutant.trace.descriptions[other].clone();
        });
        // It says that it is a repeat.
        rejected(&|mutant| mutant.origins[back] = StepOrigin::Repeated(OpIndex(0)));
        // The same, of numbers that are no zeros and ones.
        let uniform = trace(Distribution::Uniform(0.0, 1.0));
        let mut of_uniform = packed.clone();
        of_uniform.trace.descriptions[0] = uniform.descriptions[0].clone();
        assert!(check(&uniform, &of_uniform).is_err());
    }
}
