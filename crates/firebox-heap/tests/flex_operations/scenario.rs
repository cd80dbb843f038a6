//! A scenario: operations that run on Flex and are recorded at the same time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use burn_ir::{
    BaseOperationIr, MatmulOpIr, OperationIr, SwapDimsOpIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::{DType, FloatDType, Shape};
use firebox_heap::Heap;
use firebox_trace::{
    Bytes, Call, Description, DescriptionIndex, Estimate, MemoryModel, OpIndex, Origin, Step,
    TensorIndex, TensorInfo, TensorType, Trace, Use,
};

use crate::allocator;

/// Scenarios run one at a time, since all count in one allocator.
static TURN: Mutex<()> = Mutex::new(());

/// The tolerance in bytes for small allocations: shapes, reference counts, the scenario itself.
const SMALL: f64 = 96.0 * 1024.0;

/// An argument of a call.
#[derive(Clone, Copy)]
pub struct Arg {
    tensor: TensorIndex,
    last: bool,
}

/// A tensor of the scenario.
#[derive(Clone, Copy)]
pub struct Handle(TensorIndex);

impl Handle {
    /// A use after which the tensor stays.
    pub fn keep(self) -> Arg {
        Arg { tensor: self.0, last: false }
    }

    /// The last use of the tensor.
    pub fn last(self) -> Arg {
        Arg { tensor: self.0, last: true }
    }
}

/// Bytes above the start of the scenario.
struct Measured {
    before: usize,
    peak: usize,
    after: usize,
}

/// Operations in progress.
pub struct Scenario {
    _turn: MutexGuard<'static, ()>,
    trace: Trace,
    tensors: HashMap<TensorIndex, FlexTensor>,
    measured: Vec<Measured>,
    start: usize,
}

impl Scenario {
    pub fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        warm_up();
        let measured = Vec::with_capacity(64);
        Self {
            _turn: turn,
            trace: Trace::default(),
            tensors: HashMap::new(),
            measured,
            start: allocator::live(),
        }
    }

    /// A float tensor that exists before the first operation.
    pub fn existing<const N: usize>(&mut self, shape: [usize; N]) -> Handle {
        let half = burn_backend::Scalar::Float(0.5);
        let device = Default::default();
        self.adopt(Flex::float_full(Shape::new(shape), half, &device, FloatDType::F32))
    }

    /// A tensor that exists before the first operation.
    pub fn adopt(&mut self, tensor: FlexTensor) -> Handle {
        assert!(self.trace.steps.is_empty(), "existing tensors come first");
        let index = self.enter(tensor.shape(), tensor.dtype(), Origin::Existing);
        self.tensors.insert(index, tensor);
        Handle(index)
    }

    fn enter(&mut self, shape: Shape, dtype: DType, origin: Origin) -> TensorIndex {
        let ty = TensorType { shape, dtype };
        self.trace.tensors.push(TensorInfo::new(ty.into(), origin));
        TensorIndex(self.trace.tensors.len() as u32 - 1)
    }

    /// Runs a method that one operation describes.
    pub fn call<const N: usize, const M: usize>(
        &mut self,
        name: &'static str,
        args: [Arg; N],
        describe: impl FnOnce([TensorIr; N], &mut dyn FnMut() -> TensorId) -> OperationIr,
        run: impl FnOnce([FlexTensor; N]) -> [FlexTensor; M],
    ) -> [Handle; M] {
        self.call_decomposed(name, args, |inputs, new| vec![describe(inputs, new)], run)
    }

    /// Runs a method that several operations describe. The outputs are those of the last one.
    pub fn call_decomposed<const N: usize, const M: usize>(
        &mut self,
        name: &'static str,
        args: [Arg; N],
        describe: impl FnOnce([TensorIr; N], &mut dyn FnMut() -> TensorId) -> Vec<OperationIr>,
        run: impl FnOnce([FlexTensor; N]) -> [FlexTensor; M],
    ) -> [Handle; M] {
        let at = OpIndex(self.trace.steps.len() as u32);
        let inputs = std::array::from_fn(|i| self.describe(i, args[i]));
        let mut next = N as u64;
        let operations = describe(inputs, &mut || {
            next += 1;
            TensorId::new(next - 1)
        });
        let last = operations.last().expect("a call has an operation");
        let made: Vec<TensorIr> = last.outputs().cloned().collect();
        let outputs: Vec<TensorIndex> = made
            .iter()
            .map(|out| self.enter(out.shape.clone(), out.dtype, Origin::Made(at)))
            .collect();
        let description = DescriptionIndex(self.trace.descriptions.len() as u32);
        let locals = made.iter().map(|out| out.id.value()).collect();
        let description_of = Description { operations, outputs: locals, workspace: None };
        self.trace.descriptions.push(description_of.into());
        let inputs = args.map(|arg| Use { tensor: arg.tensor, last: arg.last });
        let call = Call {
            name: name.into(),
            inputs: inputs.into_iter().collect(),
            outputs: outputs.iter().copied().collect(),
            description,
        };
        self.trace.steps.push(Step::Call(Box::new(call)));
        let made = self.measure(args, run);
        let handles: [TensorIndex; M] = outputs.try_into().expect("as many outputs as described");
        for (index, tensor) in handles.iter().zip(made) {
            self.tensors.insert(*index, tensor);
        }
        handles.map(Handle)
    }

    fn describe(&self, number: usize, arg: Arg) -> TensorIr {
        let info = self.trace.tensor(arg.tensor);
        TensorIr {
            id: TensorId::new(number as u64),
            shape: info.shape.clone(),
            status: if arg.last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly },
            dtype: info.dtype,
        }
    }

    fn measure<const N: usize, const M: usize>(
        &mut self,
        args: [Arg; N],
        run: impl FnOnce([FlexTensor; N]) -> [FlexTensor; M],
    ) -> [FlexTensor; M] {
        let before = allocator::live() - self.start;
        let inputs = args.map(|arg| match arg.last {
            true => self.tensors.remove(&arg.tensor).expect("alive"),
            false => self.tensors[&arg.tensor].clone(),
        });
        let (made, peak) = allocator::peak_of(|| run(inputs));
        let after = allocator::live() - self.start;
        self.measured.push(Measured { before, peak: peak - self.start, after });
        made
    }

    /// The matrix or batch with its last two dimensions exchanged.
    pub fn transposed(&mut self, arg: Arg) -> Handle {
        let rank = self.trace.tensor(arg.tensor).shape.num_dims();
        self.swapped(arg, rank - 2, rank - 1)
    }

    /// The tensor with two dimensions exchanged.
    pub fn swapped(&mut self, arg: Arg, dim1: usize, dim2: usize) -> Handle {
        let [handle] = self.call(
            "float_swap_dims",
            [arg],
            |[x], new| {
                let op = SwapDimsOpIr::create(x, dim1, dim2, new);
                OperationIr::BaseFloat(BaseOperationIr::SwapDims(op))
            },
            |[x]| [Flex::float_swap_dims(x, dim1, dim2)],
        );
        handle
    }

    /// The matrix product.
    pub fn matmul(&mut self, lhs: Arg, rhs: Arg) -> Handle {
        let [handle] = self.call(
            "float_matmul",
            [lhs, rhs],
            |[lhs, rhs], new| {
                let op = MatmulOpIr::create(lhs, rhs, new);
                OperationIr::Float(op.out.dtype, burn_ir::FloatOperationIr::Matmul(op))
            },
            |[lhs, rhs]| [Flex::float_matmul(lhs, rhs)],
        );
        handle
    }

    /// Asserts that the model predicts what was measured.
    ///
    /// - What is alive after each step, up to small allocations.
    /// - What each step of at least one MiB needs while it runs: at least 98 % and at most 125 % of
    ///   it. At most 200 % if the model gives a bound, since it bounds what threads may do at the
    ///   same time and seldom do.
    /// - A smaller step must not be predicted above its need by more than 256 KiB.
    #[track_caller]
    pub fn check(self) {
        let heap = Heap::flex()
            .with_threads(rayon::current_num_threads())
            .with_kept_per_thread(Bytes::ZERO);
        let footprint = heap.footprint(&self.trace);
        assert!(footprint.unaccounted.is_empty(), "no rule for {:?}", footprint.unaccounted);
        let most = if footprint.estimate == Estimate::Exact { 1.25 } else { 2.0 };
        let mut before = footprint.baseline.get() as f64;
        for (at, (moment, measured)) in footprint.timeline.iter().zip(&self.measured).enumerate() {
            let Step::Call(call) = &self.trace.steps[at] else { unreachable!() };
            let (live, after) = (moment.live.get() as f64, measured.after as f64);
            let needed = (measured.peak - measured.before) as f64;
            let predicted = moment.peak.get() as f64 - before;
            println!(
                "{:>28} {:>9.3} MiB predicted {:>9.3} measured, {:.3}; live {:>9.3} / {:>9.3}",
                call.name,
                predicted / 1048576.0,
                needed / 1048576.0,
                predicted / needed.max(1.0),
                live / 1048576.0,
                after / 1048576.0,
            );
            assert!(
                (live - after).abs() <= SMALL,
                "{}: {live} bytes predicted to be alive, {after} are",
                call.name
            );
            let name = &call.name;
            if needed >= 1048576.0 {
                assert!(
                    predicted >= 0.98 * needed,
                    "{name}: {predicted} predicted, {needed} needed"
                );
                assert!(
                    predicted <= most * needed,
                    "{name}: {predicted} predicted, {needed} needed"
                );
            } else {
                assert!(predicted <= needed + SMALL.max(1048576.0 * 0.25), "{name}: {predicted}");
            }
            before = live;
        }
    }
}

/// Lets every thread allocate what it keeps for good.
fn warm_up() {
    let shape = Shape::new([2048, 512]);
    let ones = || Flex::float_ones(shape.clone(), &Default::default(), FloatDType::F32);
    for _ in 0..4 {
        drop(Flex::float_matmul(ones(), Flex::float_swap_dims(ones(), 0, 1)));
    }
    rayon::broadcast(|_| drop(small_product()));
    drop(small_product());
}

/// A product that one thread computes, using the block that it keeps.
fn small_product() -> FlexTensor {
    let ones = |shape| Flex::float_ones(Shape::new(shape), &Default::default(), FloatDType::F32);
    Flex::float_matmul(ones([64, 64]), ones([64, 512]))
}
