//! Builds traces by hand.

use burn_ir::{
    BaseOperationIr, BinaryOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr, OperationIr,
    ShapeOpIr, SliceOpIr, SwapDimsOpIr, TensorId, TensorIr, TensorStatus, UnaryOpIr,
};
use burn_std::{DType, Shape, Slice};
use firebox_trace::{
    Bytes, Call, Category, Description, DescriptionIndex, Label, OpIndex, Origin, Step,
    TensorIndex, TensorInfo, TensorType, Trace, Use,
};

/// A use after which the tensor stays.
pub fn keep(tensor: TensorIndex) -> Use {
    Use { tensor, last: false }
}

/// The last use of a tensor.
pub fn last(tensor: TensorIndex) -> Use {
    Use { tensor, last: true }
}

/// A trace in progress. Tensors are 32-bit floats.
#[derive(Default)]
pub struct Builder {
    pub trace: Trace,
}

impl Builder {
    fn enter(&mut self, shape: &[usize], origin: Origin) -> TensorIndex {
        let ty = TensorType { shape: Shape::from(shape.to_vec()), dtype: DType::F32 };
        self.trace.tensors.push(TensorInfo::new(ty.into(), origin));
        TensorIndex(self.trace.tensors.len() as u32 - 1)
    }

    fn made(&mut self, shape: &[usize]) -> TensorIndex {
        let at = OpIndex(self.trace.steps.len() as u32);
        self.enter(shape, Origin::Made(at))
    }

    /// A tensor that exists before the recording.
    pub fn existing(&mut self, shape: &[usize]) -> TensorIndex {
        self.enter(shape, Origin::Existing)
    }

    /// Labels a tensor with what it is for.
    pub fn label(&mut self, tensor: TensorIndex, category: Category, name: &str) {
        self.trace.tensors[tensor.0 as usize].label =
            Some(Label { category, name: name.into() }.into());
    }

    /// Host data becomes a tensor.
    pub fn upload(&mut self, shape: &[usize]) -> TensorIndex {
        let output = self.made(shape);
        let host = self.trace.tensor(output).bytes();
        self.trace.steps.push(Step::Upload { output, host });
        output
    }

    pub fn free(&mut self, tensor: TensorIndex) {
        self.trace.steps.push(Step::Free(tensor));
    }

    pub fn read(&mut self, read: Use) {
        self.trace.steps.push(Step::Read(read));
    }

    pub fn mark(&mut self, text: &str) {
        self.trace.steps.push(Step::Mark(text.into()));
    }

    fn ir(&self, number: usize, input: Use) -> TensorIr {
        let info = self.trace.tensor(input.tensor);
        TensorIr {
            id: TensorId::new(number as u64),
            shape: info.shape.clone(),
            status: if input.last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly },
            dtype: info.dtype,
        }
    }

    /// A call of `name` that one operation describes.
    pub fn call<const N: usize>(
        &mut self,
        name: &'static str,
        inputs: [Use; N],
        describe: impl FnOnce([TensorIr; N], TensorId) -> OperationIr,
    ) -> TensorIndex {
        let id = TensorId::new(N as u64);
        let op = describe(std::array::from_fn(|i| self.ir(i, inputs[i])), id);
        let out = op.outputs().next().expect("the operation has an output").clone();
        let output = self.made(out.shape.as_slice());
        let ty = TensorType { shape: out.shape.clone(), dtype: out.dtype };
        self.trace.tensors[output.0 as usize].ty = ty.into();
        let description = DescriptionIndex(self.trace.descriptions.len() as u32);
        self.trace.descriptions.push(std::sync::Arc::new(Description {
            operations: vec![op],
            outputs: vec![id.value()],
            workspace: None,
        }));
        self.trace.steps.push(Step::Call(Box::new(Call {
            name: name.into(),
            inputs: inputs.into_iter().collect(),
            outputs: [output].into_iter().collect(),
            description,
        })));
        output
    }

    pub fn exp(&mut self, x: Use) -> TensorIndex {
        self.call("float_exp", [x], |[x], id| {
            OperationIr::Float(x.dtype, FloatOperationIr::Exp(UnaryOpIr::create(x, || id)))
        })
    }

    pub fn add(&mut self, lhs: Use, rhs: Use) -> TensorIndex {
        self.call("float_add", [lhs, rhs], |[lhs, rhs], id| {
            let op = BinaryOpIr::create(lhs, rhs, || id);
            OperationIr::NumericFloat(op.out.dtype, NumericOperationIr::Add(op))
        })
    }

    pub fn matmul(&mut self, lhs: Use, rhs: Use) -> TensorIndex {
        self.call("float_matmul", [lhs, rhs], |[lhs, rhs], id| {
            let op = MatmulOpIr::create(lhs, rhs, || id);
            OperationIr::Float(op.out.dtype, FloatOperationIr::Matmul(op))
        })
    }

    pub fn reshape(&mut self, x: Use, shape: &[usize]) -> TensorIndex {
        let shape = Shape::from(shape.to_vec());
        self.call("float_reshape", [x], |[x], id| {
            let op = ShapeOpIr::reshape(x, shape, || id);
            OperationIr::BaseFloat(BaseOperationIr::Reshape(op))
        })
    }

    pub fn transpose(&mut self, x: Use) -> TensorIndex {
        let rank = self.trace.tensor(x.tensor).shape.num_dims();
        self.call("float_swap_dims", [x], |[x], id| {
            let op = SwapDimsOpIr::create(x, rank - 2, rank - 1, || id);
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(op))
        })
    }

    /// The first `rows` rows.
    pub fn head(&mut self, x: Use, rows: usize) -> TensorIndex {
        let ranges = vec![Slice::new(0, Some(rows as isize), 1)];
        self.call("float_slice", [x], |[x], id| {
            OperationIr::BaseFloat(BaseOperationIr::Slice(SliceOpIr::create(x, ranges, || id)))
        })
    }

    /// A call of a method that no model knows.
    pub fn unknown(&mut self, x: Use) -> TensorIndex {
        self.call("float_fold_space", [x], |[x], id| {
            OperationIr::Float(x.dtype, FloatOperationIr::Exp(UnaryOpIr::create(x, || id)))
        })
    }
}

/// The bytes of `count` 32-bit floats.
pub fn floats(count: u64) -> Bytes {
    Bytes::new(4 * count)
}
