//! What every operation of burn-ir makes of items.

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{
    BaseOperationIr, BoolOperationIr, CustomOpIr, FloatOperationIr, IntOperationIr, MatmulOpIr,
    ModuleOperationIr, NumericOperationIr, OperationIr, RandomOpIr, SliceAssignOpIr, SliceOpIr,
    TensorIr,
};

use crate::follow::{Both, Follow, Goes, Operand, Undecided, along};
use crate::value::{Axis, By, Kind, Root, Value};

/// A tensor of an operation, and what becomes of items in each of its dimensions.
type Input<'i> = (&'i TensorIr, Box<dyn Fn(usize) -> Goes + 'i>);

fn goes<'i>(tensor: &'i TensorIr, rule: impl Fn(usize) -> Goes + 'i) -> Input<'i> {
    (tensor, Box::new(rule))
}

/// Items may be in the first dimensions, which are those of the result.
fn leading(tensor: &TensorIr, most: usize) -> Input<'_> {
    goes(tensor, move |dim| if dim < most { Goes::To(dim) } else { Goes::Meets })
}

/// Items may be in one dimension, which goes on as this one.
fn only(tensor: &TensorIr, dim: usize, to: Goes) -> Input<'_> {
    goes(tensor, move |of| if of == dim { to } else { Goes::Meets })
}

/// No item may be in it.
fn nowhere(tensor: &TensorIr) -> Input<'_> {
    goes(tensor, |_| Goes::Meets)
}

/// Whether both are known, and equal.
fn alike<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
    one.is_some() && one == other
}

/// Whether these fields are equal in two operations.
macro_rules! same {
    ($x:ident, $y:ident: $($field:ident),+) => { $($x.$field == $y.$field)&&+ };
}

impl Follow<'_> {
    fn results<'b>(a: &'b OperationIr, b: &'b OperationIr) -> Vec<Both<'b>> {
        a.outputs().zip(b.outputs()).map(|(a, b)| Both(a, b)).collect()
    }

    /// A result of these operands.
    fn make(&mut self, out: Both<'_>, inputs: Vec<Input<'_>>, by: By) {
        let made = self.made(out, inputs, by);
        self.set(out, made);
    }

    fn made(&mut self, out: Both<'_>, inputs: Vec<Input<'_>>, by: By) -> Value {
        let values: Vec<Value> = inputs.iter().map(|(tensor, _)| self.get(tensor)).collect();
        let operands = values.iter().zip(inputs);
        let operands = operands.map(|(value, (_, goes))| Operand { value, goes });
        self.combine(out, &operands.collect::<Vec<_>>(), by)
    }

    /// A result plus a bias in one of its dimensions.
    fn with_bias(&mut self, out: Both<'_>, inputs: Vec<Input<'_>>, bias: Option<&TensorIr>) {
        let made = self.made(out, inputs, By::Product);
        let made = match bias {
            Some(bias) => {
                let bias = self.get(bias);
                let operands =
                    [along(&made), Operand { value: &bias, goes: Box::new(|_| Goes::Meets) }];
                self.combine(out, &operands, By::Sum)
            }
            None => made,
        };
        self.set(out, made);
    }

    /// An operation on elements, of all its operands.
    fn all(&mut self, a: &OperationIr, b: &OperationIr, by: By) {
        let values: Vec<Value> = a.inputs().map(|tensor| self.get(tensor)).collect();
        let values: Vec<&Value> = values.iter().collect();
        for out in Self::results(a, b) {
            let made = self.elementwise(out, &values, by);
            self.set(out, made);
        }
    }

    /// An operation along a dimension, which is no sum over it.
    fn over(&mut self, a: &OperationIr, b: &OperationIr, dim: usize, by: By) {
        for out in Self::results(a, b) {
            let rule = |of: usize| if of == dim { Goes::Meets } else { Goes::To(of) };
            self.make(out, a.inputs().map(|tensor| goes(tensor, rule)).collect(), by);
        }
    }

    /// An operation on the inner dimensions of all operands.
    fn inner(&mut self, a: &OperationIr, b: &OperationIr, first: usize, by: By) {
        for out in Self::results(a, b) {
            self.make(out, a.inputs().map(|tensor| leading(tensor, first)).collect(), by);
        }
    }

    /// # Errors
    ///
    /// If the two are other operations.
    pub(crate) fn operation(&mut self, a: &OperationIr, b: &OperationIr) -> Result<(), Undecided> {
        use OperationIr as O;
        let is_known = match (a, b) {
            (O::BaseFloat(x), O::BaseFloat(y))
            | (O::BaseInt(x), O::BaseInt(y))
            | (O::BaseBool(x), O::BaseBool(y)) => self.base((a, b), x, y),
            (O::NumericFloat(_, x), O::NumericFloat(_, y))
            | (O::NumericInt(_, x), O::NumericInt(_, y)) => self.numeric((a, b), x, y),
            (O::Float(_, x), O::Float(_, y)) => self.float((a, b), x, y),
            (O::Int(x), O::Int(y)) => self.int((a, b), x, y),
            (O::Bool(x), O::Bool(y)) => {
                let is_cast =
                    matches!(x, BoolOperationIr::IntoFloat(_) | BoolOperationIr::IntoInt(_));
                self.all(a, b, if is_cast { By::Sum } else { By::Any });
                std::mem::discriminant(x) == std::mem::discriminant(y)
            }
            (O::Module(x), O::Module(y)) => self.module((a, b), x, y),
            (O::Custom(x), O::Custom(y)) => self.custom((a, b), x, y),
            _ => false,
        };
        match is_known {
            true => Ok(()),
            false => Err(format!("`{}` does something else on {} items", self.name, self.n[1])),
        }
    }

    fn base(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &BaseOperationIr,
        y: &BaseOperationIr,
    ) -> bool {
        use BaseOperationIr as O;
        match (x, y) {
            (O::Reshape(x), O::Reshape(y)) => {
                let value = self.get(&x.input);
                self.reshape(&value, Both(&x.input, &y.input), Both(&x.out, &y.out));
            }
            (O::SwapDims(x), O::SwapDims(y)) if same!(x, y: dim1, dim2) => {
                let value = self.get(&x.input);
                self.moved(&value, Both(&x.out, &y.out), |axis| {
                    let dim = match axis.dim {
                        dim if dim == x.dim1 => x.dim2,
                        dim if dim == x.dim2 => x.dim1,
                        dim => dim,
                    };
                    Some(Axis { dim, ..axis })
                });
            }
            (O::Permute(x), O::Permute(y)) if same!(x, y: axes) => {
                let value = self.get(&x.input);
                self.moved(&value, Both(&x.out, &y.out), |axis| {
                    let dim = x.axes.iter().position(|of| *of == axis.dim)?;
                    Some(Axis { dim, ..axis })
                });
            }
            (O::Flip(x), O::Flip(y)) if same!(x, y: axes) => {
                let value = self.get(&x.input);
                let stays = |axis: &Axis| axis.free || !x.axes.contains(&axis.dim);
                self.moved(&value, Both(&x.out, &y.out), |axis| Some(axis).filter(stays));
            }
            (O::Expand(x), O::Expand(y)) => {
                let value = self.get(&x.input);
                self.expand(&value, &x.input, Both(&x.out, &y.out));
            }
            (O::Unfold(x), O::Unfold(y)) if same!(x, y: dim, size, step) => {
                let value = self.get(&x.input);
                let stays = |axis: &Axis| axis.dim != x.dim;
                self.moved(&value, Both(&x.out, &y.out), |axis| Some(axis).filter(stays));
            }
            (O::Slice(x), O::Slice(y)) => self.slice(x, y),
            (O::SliceAssign(x), O::SliceAssign(y)) => self.slice_assign(x, y),
            (O::Select(x), O::Select(y)) if same!(x, y: dim) => {
                self.pick(Both(&x.out, &y.out), &x.tensor, (&x.indices, true), x.dim);
            }
            (O::Gather(x), O::Gather(y)) if same!(x, y: dim) => {
                self.pick(Both(&x.out, &y.out), &x.tensor, (&x.indices, false), x.dim);
            }
            (O::SelectAssign(x), O::SelectAssign(y)) if same!(x, y: dim, update) => {
                let indices = only(&x.indices, 0, Goes::Adds(0));
                self.put(Both(&x.out, &y.out), &x.tensor, indices, (&x.value, x.dim), &x.update);
            }
            (O::Scatter(x), O::Scatter(y)) if same!(x, y: dim, update) => {
                let dim = x.dim;
                let adds = |of: usize| if of == dim { Goes::Adds(0) } else { Goes::To(of) };
                let indices = goes(&x.indices, adds);
                self.put(Both(&x.out, &y.out), &x.tensor, indices, (&x.value, dim), &x.update);
            }
            (O::GatherNd(x), O::GatherNd(y)) => {
                let last = x.indices.shape.num_dims() - 1;
                let inputs = vec![leading(&x.indices, last), nowhere(&x.data)];
                self.make(Both(&x.out, &y.out), inputs, By::Selection);
            }
            (O::ScatterNd(x), O::ScatterNd(y)) if same!(x, y: reduction) => {
                let last = x.indices.shape.num_dims() - 1;
                let adds = move |dim: usize| if dim < last { Goes::Adds(dim) } else { Goes::Meets };
                let inputs = vec![goes(&x.indices, adds), goes(&x.values, adds)];
                self.add_to(Both(&x.out, &y.out), nowhere(&x.data), inputs, &x.reduction);
            }
            (O::MaskWhere(x), O::MaskWhere(y)) => {
                let [mask, of, value] = [&x.mask, &x.tensor, &x.value].map(|it| self.get(it));
                let out = Both(&x.out, &y.out);
                let made = self.elementwise(out, &[&mask, &of, &value], By::Selection);
                self.set(out, made);
            }
            (O::MaskFill(x), O::MaskFill(y)) => {
                let [mask, of] = [&x.mask, &x.tensor].map(|it| self.get(it));
                let (value, out) = (self.number(x.value, y.value), Both(&x.out, &y.out));
                let made = self.elementwise(out, &[&mask, &of, &value], By::Selection);
                self.set(out, made);
            }
            (O::Equal(_), O::Equal(_)) => self.all(a, b, By::Any),
            (O::EqualElem(x), O::EqualElem(y)) => {
                let value = self.get(&x.lhs);
                self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), By::Any);
            }
            (O::RepeatDim(x), O::RepeatDim(y)) => {
                let (value, out) = (self.get(&x.tensor), Both(&x.out, &y.out));
                if x.times == y.times {
                    self.moved(&value, out, |axis| {
                        let times = if axis.dim == x.dim { x.times } else { 1 };
                        Some(Axis { outer: axis.outer * times, ..axis })
                    });
                } else if x.tensor.shape[x.dim] == 1 {
                    self.expand(&value, &x.tensor, out);
                } else {
                    let made = self.opaque(out, &[&value], "repeated for each item");
                    self.set(out, made);
                }
            }
            (O::Cat(x), O::Cat(y)) if x.dim == y.dim && x.tensors.len() == y.tensors.len() => {
                self.cat(&x.tensors, x.dim, Both(&x.out, &y.out));
            }
            (O::Cast(_), O::Cast(_)) => self.all(a, b, By::Sum),
            (O::Empty(x), O::Empty(y)) | (O::Ones(x), O::Ones(y)) => {
                self.create(Both(&x.out, &y.out), None, false, false);
            }
            (O::Zeros(x), O::Zeros(y)) => self.create(Both(&x.out, &y.out), None, false, true),
            _ => return false,
        }
        true
    }

    fn slice(&mut self, x: &SliceOpIr, y: &SliceOpIr) {
        let (value, out) = (self.get(&x.tensor), Both(&x.out, &y.out));
        let part = |op: &SliceOpIr, dim: usize| {
            let len = op.out.shape[dim];
            let Some(range) = op.ranges.get(dim) else { return Some((0, len)) };
            let size = op.tensor.shape[dim] as isize;
            let start = if range.start < 0 { range.start + size } else { range.start };
            (range.step == 1).then_some((start as usize, len))
        };
        // In dimensions without items, the same part is cut off.
        let item = value.axis().map(|axis| axis.dim);
        let others = (0..x.out.shape.num_dims()).filter(|dim| Some(*dim) != item);
        let is_same = others
            .clone()
            .all(|dim| x.ranges.get(dim) == y.ranges.get(dim) || alike(part(x, dim), part(y, dim)));
        let place = value.axis().and_then(|axis| {
            let parts = [part(x, axis.dim)?, part(y, axis.dim)?];
            let outer = self.rounds(axis, parts).filter(|_| is_same)?;
            Some(Axis { outer, ..axis })
        });
        if value.axis().is_none() && !is_same {
            self.sized.insert(self.step);
            let made = self.opaque(
                out,
                &[&value, &Value::number(Some(Root::Items), false)],
                "cut by the number of items",
            );
            return self.set(out, made);
        }
        self.moved(&value, out, |_| place);
    }

    fn slice_assign(&mut self, x: &SliceAssignOpIr, y: &SliceAssignOpIr) {
        let out = Both(&x.out, &y.out);
        let (of, mut value) = (self.get(&x.tensor), self.get(&x.value));
        let start = |op: &SliceAssignOpIr, dim: usize| {
            let range = op.ranges.get(dim);
            let whole = op.tensor.shape[dim] as isize;
            range.map_or(Some(0), |range| {
                let start = if range.start < 0 { range.start + whole } else { range.start };
                (range.step == 1).then_some(start as usize)
            })
        };
        let item = of.axis().map(|axis| axis.dim);
        let mut fits = (0..x.out.shape.num_dims()).filter(|dim| Some(*dim) != item).all(|dim| {
            x.ranges.get(dim) == y.ranges.get(dim) || alike(start(x, dim), start(y, dim))
        });
        // What has no items has its place among them.
        fits &= of.axis().is_none() || value.axis().is_some();
        if let (Some(all), Kind::ByItem(part, _)) = (of.axis(), &mut value.kind) {
            // Whole rounds of items are put among equal ones, or among others of the same order.
            let parts = start(x, all.dim).zip(start(y, all.dim));
            let lens = [x.value.shape[all.dim], y.value.shape[all.dim]];
            let rounds = parts.and_then(|(a, b)| self.rounds(*part, [(a, lens[0]), (b, lens[1])]));
            let round = self.n[0] * part.inner;
            fits &= all.dim == part.dim
                && rounds.is_some()
                && (all.free || all.inner == part.inner)
                && x.tensor.shape[all.dim].is_multiple_of(round);
            part.outer = x.tensor.shape[all.dim] / round.max(1);
            (part.free, part.uniform) = (false, false);
        }
        let mut made = match fits {
            true => self.elementwise(out, &[&of, &value], By::Sum),
            false => self.opaque(out, &[&of, &value], "items are put by their places"),
        };
        if let Kind::ByItem(axis, _) = &mut made.kind {
            (axis.free, axis.uniform) = (false, false);
        }
        self.set(out, made);
    }

    fn cat(&mut self, tensors: &[TensorIr], dim: usize, out: Both<'_>) {
        let values: Vec<Value> = tensors.iter().map(|tensor| self.get(tensor)).collect();
        let values: Vec<&Value> = values.iter().collect();
        let is_along = values.iter().any(|value| value.axis().is_some_and(|axis| axis.dim == dim));
        let mut made = match self.after_mixed(out, &values) {
            Some(mixed) => mixed,
            None if is_along => {
                let axes: Option<Vec<Axis>> = values.iter().map(|value| value.axis()).collect();
                let axes = axes.filter(|axes| {
                    axes.iter().all(|axis| axis.dim == dim && axis.inner == axes[0].inner)
                });
                let pure = values.iter().all(|value| value.pure);
                match axes {
                    Some(axes) => {
                        let outer = axes.iter().map(|axis| axis.outer).sum();
                        let terms = values.iter().flat_map(|value| match &value.kind {
                            Kind::ByItem(_, terms) => terms.clone(),
                            _ => Default::default(),
                        });
                        Value::new(Kind::ByItem(Axis { outer, ..axes[0] }, terms.collect()), pure)
                    }
                    None => self.mix(out, pure, "items are followed by something else"),
                }
            }
            None => self.elementwise(out, &values, By::Sum),
        };
        if let Kind::ByItem(axis, _) = &mut made.kind {
            (axis.free, axis.uniform) = (false, false);
        }
        self.set(out, made);
    }

    /// Elements that are picked along a dimension. `is_list`: the indices are one list.
    fn pick(
        &mut self,
        out: Both<'_>,
        tensor: &TensorIr,
        (indices, is_list): (&TensorIr, bool),
        dim: usize,
    ) {
        let at = move |of: usize| if is_list { Goes::To(dim) } else { Goes::To(of) };
        let of = move |of: usize| if of == dim { Goes::Meets } else { Goes::To(of) };
        self.make(out, vec![goes(indices, at), goes(tensor, of)], By::Selection);
    }

    /// Values that are put along a dimension.
    fn put(
        &mut self,
        out: Both<'_>,
        tensor: &TensorIr,
        indices: Input<'_>,
        (value, dim): (&TensorIr, usize),
        update: &IndexingUpdateOp,
    ) {
        let there = move |of: usize| if of == dim { Goes::Meets } else { Goes::To(of) };
        let adds = move |of: usize| if of == dim { Goes::Adds(0) } else { Goes::To(of) };
        self.add_to(out, goes(tensor, there), vec![indices, goes(value, adds)], update);
    }

    /// Values of a selection that are added to a tensor, or take its place.
    fn add_to(
        &mut self,
        out: Both<'_>,
        tensor: Input<'_>,
        selected: Vec<Input<'_>>,
        update: &IndexingUpdateOp,
    ) {
        // Truth values do not add up.
        let selects = if out.0.dtype.is_bool() { By::Any } else { By::Selection };
        let made = self.made(out, selected, selects);
        let of = self.get(tensor.0);
        let by = if matches!(update, IndexingUpdateOp::Add) { By::Sum } else { By::Any };
        let operands = [along(&made), Operand { value: &of, goes: tensor.1 }];
        let made = self.combine(out, &operands, by);
        self.set(out, made);
    }

    fn numeric(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &NumericOperationIr,
        y: &NumericOperationIr,
    ) -> bool {
        use NumericOperationIr as O;
        // Quotients of integers are rounded.
        let is_int = matches!(a, OperationIr::NumericInt(..));
        let quotient = if is_int { By::Any } else { By::Quotient };
        let mean = (!is_int).then_some(true);
        let mut with_number = |x: &burn_ir::ScalarOpIr, y: &burn_ir::ScalarOpIr, by: By| {
            let value = self.get(&x.lhs);
            self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), by);
        };
        match (x, y) {
            (O::AddScalar(x), O::AddScalar(y)) | (O::SubScalar(x), O::SubScalar(y)) => {
                with_number(x, y, By::Sum);
            }
            (O::MulScalar(x), O::MulScalar(y)) => with_number(x, y, By::Product),
            (O::DivScalar(x), O::DivScalar(y)) => with_number(x, y, quotient),
            (O::RemScalar(x), O::RemScalar(y))
            | (O::GreaterElem(x), O::GreaterElem(y))
            | (O::GreaterEqualElem(x), O::GreaterEqualElem(y))
            | (O::LowerElem(x), O::LowerElem(y))
            | (O::LowerEqualElem(x), O::LowerEqualElem(y))
            | (O::PowiScalar(x), O::PowiScalar(y)) => with_number(x, y, By::Any),
            (O::Add(_), O::Add(_)) | (O::Sub(_), O::Sub(_)) => self.all(a, b, By::Sum),
            (O::Mul(x), O::Mul(y)) => {
                let (left, right) = (self.get(&x.lhs), self.get(&x.rhs));
                let out = Both(&x.out, &y.out);
                let made = self.elementwise(out, &[&left, &right], By::Product);
                self.set(out, made);
            }
            (O::Div(_), O::Div(_)) => self.all(a, b, quotient),
            (O::Full(x), O::Full(y)) => {
                let value = self.number(x.value, y.value);
                let root = Some(value.root).filter(|_| value.factor() != Some(Default::default()));
                self.create(Both(&x.out, &y.out), root, false, value.zero);
            }
            (O::Sum(x), O::Sum(y)) => {
                let value = self.get(&x.input);
                self.reduce(&value, Both(&x.out, &y.out), None, Some(false));
            }
            (O::Mean(x), O::Mean(y)) => {
                let value = self.get(&x.input);
                self.reduce(&value, Both(&x.out, &y.out), None, mean);
            }
            (O::SumDim(x), O::SumDim(y)) if same!(x, y: axis) => {
                let value = self.get(&x.input);
                self.reduce(&value, Both(&x.out, &y.out), Some(x.axis), Some(false));
            }
            (O::MeanDim(x), O::MeanDim(y)) if same!(x, y: axis) => {
                let value = self.get(&x.input);
                self.reduce(&value, Both(&x.out, &y.out), Some(x.axis), mean);
            }
            (O::Prod(x), O::Prod(y))
            | (O::Max(x), O::Max(y))
            | (O::Min(x), O::Min(y))
            | (O::MaxAbs(x), O::MaxAbs(y)) => {
                let value = self.get(&x.input);
                self.reduce(&value, Both(&x.out, &y.out), None, None);
            }
            (O::ProdDim(x), O::ProdDim(y))
            | (O::ArgMax(x), O::ArgMax(y))
            | (O::ArgMin(x), O::ArgMin(y))
            | (O::ArgTopK(x), O::ArgTopK(y))
            | (O::TopK(x), O::TopK(y))
            | (O::MaxDim(x), O::MaxDim(y))
            | (O::MinDim(x), O::MinDim(y))
            | (O::MaxAbsDim(x), O::MaxAbsDim(y))
                if same!(x, y: axis) =>
            {
                self.over(a, b, x.axis, By::Any);
            }
            (O::MaxDimWithIndices(x), O::MaxDimWithIndices(y))
            | (O::MinDimWithIndices(x), O::MinDimWithIndices(y))
                if same!(x, y: dim) =>
            {
                self.over(a, b, x.dim, By::Any);
            }
            (O::CumSum(x), O::CumSum(y)) if same!(x, y: axis) => self.over(a, b, x.axis, By::Sum),
            (O::CumProd(x), O::CumProd(y))
            | (O::CumMin(x), O::CumMin(y))
            | (O::CumMax(x), O::CumMax(y))
                if same!(x, y: axis) =>
            {
                self.over(a, b, x.axis, By::Any);
            }
            (O::Clamp(x), O::Clamp(y)) => {
                let (value, out) = (self.get(&x.tensor), Both(&x.out, &y.out));
                let bounds = [self.number(x.min, y.min), self.number(x.max, y.max)];
                let made = self.elementwise(out, &[&value, &bounds[0], &bounds[1]], By::Any);
                self.set(out, made);
            }
            (O::IntRandom(x), O::IntRandom(y)) => return self.random(x, y),
            (O::Rem(_), O::Rem(_))
            | (O::Abs(_), O::Abs(_))
            | (O::Powi(_), O::Powi(_))
            | (O::Greater(_), O::Greater(_))
            | (O::GreaterEqual(_), O::GreaterEqual(_))
            | (O::Lower(_), O::Lower(_))
            | (O::LowerEqual(_), O::LowerEqual(_)) => self.all(a, b, By::Any),
            _ => return false,
        }
        true
    }

    /// Micro-batches draw their own numbers, also where a batch would share one.
    fn random(&mut self, x: &RandomOpIr, y: &RandomOpIr) -> bool {
        self.create(Both(&x.out, &y.out), None, true, false);
        x.distribution == y.distribution
    }

    fn matmul(&mut self, x: &MatmulOpIr, y: &MatmulOpIr) {
        let rank = x.out.shape.num_dims();
        let left =
            goes(&x.lhs, move |dim| if dim + 1 == rank { Goes::Adds(0) } else { Goes::To(dim) });
        let right =
            goes(&x.rhs, move |dim| if dim + 2 == rank { Goes::Adds(0) } else { Goes::To(dim) });
        self.make(Both(&x.out, &y.out), vec![left, right], By::Product);
    }

    fn float(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &FloatOperationIr,
        y: &FloatOperationIr,
    ) -> bool {
        use FloatOperationIr as O;
        match (x, y) {
            (O::Matmul(x), O::Matmul(y)) => self.matmul(x, y),
            (O::Random(x), O::Random(y)) => return self.random(x, y),
            (O::PowfScalar(x), O::PowfScalar(y)) => {
                let value = self.get(&x.lhs);
                self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), By::Any);
            }
            (O::Cross(x), O::Cross(y)) if same!(x, y: dim) => self.over(a, b, x.dim, By::Any),
            (O::GridSample2d(x), O::GridSample2d(y)) if same!(x, y: options) => {
                self.inner(a, b, 1, By::Any);
            }
            (O::Quantize(_) | O::Dequantize(_), _) => self.inner(a, b, 0, By::Any),
            (O::Cross(_) | O::GridSample2d(_), _) => return false,
            _ => self.all(a, b, By::Any),
        }
        std::mem::discriminant(x) == std::mem::discriminant(y)
    }

    fn int(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &IntOperationIr,
        y: &IntOperationIr,
    ) -> bool {
        use IntOperationIr as O;
        match (x, y) {
            (O::IntoFloat(_), O::IntoFloat(_)) => self.all(a, b, By::Sum),
            (O::Matmul(x), O::Matmul(y)) => self.matmul(x, y),
            (O::BitwiseAndScalar(x), O::BitwiseAndScalar(y))
            | (O::BitwiseOrScalar(x), O::BitwiseOrScalar(y))
            | (O::BitwiseXorScalar(x), O::BitwiseXorScalar(y))
            | (O::BitwiseLeftShiftScalar(x), O::BitwiseLeftShiftScalar(y))
            | (O::BitwiseRightShiftScalar(x), O::BitwiseRightShiftScalar(y)) => {
                let value = self.get(&x.lhs);
                self.with_number(&value, (x.rhs, y.rhs), Both(&x.out, &y.out), By::Any);
            }
            _ => self.all(a, b, By::Any),
        }
        std::mem::discriminant(x) == std::mem::discriminant(y)
    }

    fn module(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &ModuleOperationIr,
        y: &ModuleOperationIr,
    ) -> bool {
        use ModuleOperationIr as O;
        let outs = Self::results(a, b);
        let out = outs[0];
        // Layers of images: items are in dimension 0.
        macro_rules! convolution {
            ($x:ident) => {{
                // The gradient of weights is computed so: over channels that are items.
                let sums = if $x.options.groups == 1 { Goes::Adds(0) } else { Goes::Meets };
                let input = goes(&$x.x, move |dim| match dim {
                    0 => Goes::To(0),
                    1 => sums,
                    _ => Goes::Meets,
                });
                let weight = goes(&$x.weight, move |dim| match dim {
                    0 => Goes::To(1),
                    1 => sums,
                    _ => Goes::Meets,
                });
                self.with_bias(out, vec![input, weight], $x.bias.as_ref());
            }};
        }
        macro_rules! transposed {
            ($x:ident) => {
                self.with_bias(out, vec![leading(&$x.x, 1), nowhere(&$x.weight)], $x.bias.as_ref())
            };
        }
        macro_rules! of_input {
            ($x:ident) => {
                self.make(out, vec![leading(&$x.output_grad, 1), nowhere(&$x.weight)], By::Product)
            };
        }
        macro_rules! of_weight {
            ($x:ident) => {{
                let inputs = [&$x.x, &$x.output_grad].map(|it| only(it, 0, Goes::Adds(0)));
                self.make(out, inputs.into(), By::Product);
            }};
        }
        macro_rules! of_bias {
            ($x:ident) => {
                self.make(out, vec![only(&$x.output_grad, 0, Goes::Adds(0))], By::Sum)
            };
        }
        match (x, y) {
            (O::Embedding(x), O::Embedding(_)) => {
                let at = goes(&x.indices, Goes::To);
                self.make(out, vec![at, nowhere(&x.weights)], By::Selection);
            }
            (O::EmbeddingBackward(x), O::EmbeddingBackward(_)) => {
                let rank = x.indices.shape.num_dims();
                let at = goes(&x.indices, Goes::Adds);
                let grad =
                    goes(
                        &x.out_grad,
                        move |dim| {
                            if dim < rank { Goes::Adds(dim) } else { Goes::To(1) }
                        },
                    );
                self.make(out, vec![at, grad], By::Selection);
            }
            (O::Linear(x), O::Linear(_)) => {
                let last = x.x.shape.num_dims() - 1;
                let input =
                    goes(&x.x, move |dim| if dim == last { Goes::Adds(0) } else { Goes::To(dim) });
                let weight = goes(
                    &x.weight,
                    move |dim| if dim == 0 { Goes::Adds(0) } else { Goes::To(last) },
                );
                self.with_bias(out, vec![input, weight], x.bias.as_ref());
            }
            (O::LinearXBackward(x), O::LinearXBackward(_)) => {
                let last = x.output_grad.shape.num_dims() - 1;
                let inputs = vec![leading(&x.output_grad, last), nowhere(&x.weight)];
                self.make(out, inputs, By::Product);
            }
            (O::LinearWeightBackward(x), O::LinearWeightBackward(_)) => {
                let last = x.x.shape.num_dims() - 1;
                let [input, grad] = [(&x.x, 0), (&x.output_grad, 1)].map(|(tensor, to)| {
                    goes(
                        tensor,
                        move |dim| if dim == last { Goes::To(to) } else { Goes::Adds(dim) },
                    )
                });
                self.make(out, vec![input, grad], By::Product);
            }
            (O::LinearBiasBackward(x), O::LinearBiasBackward(_)) => {
                let last = x.output_grad.shape.num_dims() - 1;
                let rule =
                    move |dim: usize| if dim == last { Goes::To(0) } else { Goes::Adds(dim) };
                self.make(out, vec![goes(&x.output_grad, rule)], By::Sum);
            }
            (O::Conv1d(x), O::Conv1d(y)) if same!(x, y: options) => convolution!(x),
            (O::Conv2d(x), O::Conv2d(y)) if same!(x, y: options) => convolution!(x),
            (O::Conv3d(x), O::Conv3d(y)) if same!(x, y: options) => convolution!(x),
            (O::ConvTranspose1d(x), O::ConvTranspose1d(y)) if same!(x, y: options) => {
                transposed!(x)
            }
            (O::ConvTranspose2d(x), O::ConvTranspose2d(y)) if same!(x, y: options) => {
                transposed!(x)
            }
            (O::ConvTranspose3d(x), O::ConvTranspose3d(y)) if same!(x, y: options) => {
                transposed!(x)
            }
            (O::Conv1dXBackward(x), O::Conv1dXBackward(y)) if same!(x, y: options) => of_input!(x),
            (O::Conv2dXBackward(x), O::Conv2dXBackward(y)) if same!(x, y: options) => of_input!(x),
            (O::Conv3dXBackward(x), O::Conv3dXBackward(y)) if same!(x, y: options) => of_input!(x),
            (O::Conv1dWeightBackward(x), O::Conv1dWeightBackward(y)) if same!(x, y: options) => {
                of_weight!(x)
            }
            (O::Conv2dWeightBackward(x), O::Conv2dWeightBackward(y)) if same!(x, y: options) => {
                of_weight!(x)
            }
            (O::Conv3dWeightBackward(x), O::Conv3dWeightBackward(y)) if same!(x, y: options) => {
                of_weight!(x)
            }
            (O::Conv1dBiasBackward(x), O::Conv1dBiasBackward(_)) => of_bias!(x),
            (O::Conv2dBiasBackward(x), O::Conv2dBiasBackward(_)) => of_bias!(x),
            (O::Conv3dBiasBackward(x), O::Conv3dBiasBackward(_)) => of_bias!(x),
            (O::DeformableConv2d(x), O::DeformableConv2d(y)) if same!(x, y: options) => {
                let mut inputs = vec![leading(&x.x, 1), leading(&x.offset, 1), nowhere(&x.weight)];
                inputs.extend(x.mask.as_ref().map(|mask| leading(mask, 1)));
                inputs.extend(x.bias.as_ref().map(nowhere));
                self.make(out, inputs, By::Any);
            }
            (O::DeformableConv2dBackward(x), O::DeformableConv2dBackward(y)) if same!(x, y: options) => {
                for (made, other) in a.outputs().zip(b.outputs()) {
                    let is_of_weights = made.id == x.weight_grad.id
                        || x.bias_grad.as_ref().is_some_and(|grad| made.id == grad.id);
                    let first = if is_of_weights { Goes::Adds(0) } else { Goes::To(0) };
                    let mut inputs = vec![only(&x.out_grad, 0, first), only(&x.x, 0, first)];
                    inputs.push(only(&x.offset, 0, first));
                    inputs.extend(x.mask.as_ref().map(|mask| only(mask, 0, first)));
                    inputs.push(nowhere(&x.weight));
                    self.make(Both(made, other), inputs, By::First);
                }
            }
            (O::AvgPool1d(x), O::AvgPool1d(y)) if same!(x, y: kernel_size, stride, padding, count_include_pad, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Sum);
            }
            (O::AvgPool2d(x), O::AvgPool2d(y)) if same!(x, y: kernel_size, stride, padding, count_include_pad, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Sum);
            }
            (O::AdaptiveAvgPool1d(_), O::AdaptiveAvgPool1d(_))
            | (O::AdaptiveAvgPool2d(_), O::AdaptiveAvgPool2d(_)) => self.inner(a, b, 2, By::Sum),
            (O::Interpolate(x), O::Interpolate(y)) if same!(x, y: output_size, options) => {
                self.inner(a, b, 2, By::Sum);
            }
            (O::AvgPool1dBackward(x), O::AvgPool1dBackward(y)) if same!(x, y: kernel_size, stride, padding, count_include_pad, ceil_mode) =>
            {
                self.make(out, vec![leading(&x.grad, 2)], By::Sum);
            }
            (O::AvgPool2dBackward(x), O::AvgPool2dBackward(y)) if same!(x, y: kernel_size, stride, padding, count_include_pad, ceil_mode) =>
            {
                self.make(out, vec![leading(&x.grad, 2)], By::Sum);
            }
            (O::AdaptiveAvgPool1dBackward(x), O::AdaptiveAvgPool1dBackward(_)) => {
                self.make(out, vec![leading(&x.grad, 2)], By::Sum);
            }
            (O::AdaptiveAvgPool2dBackward(x), O::AdaptiveAvgPool2dBackward(_)) => {
                self.make(out, vec![leading(&x.grad, 2)], By::Sum);
            }
            (O::InterpolateBackward(x), O::InterpolateBackward(y)) if same!(x, y: output_size, options) =>
            {
                self.make(out, vec![leading(&x.grad, 2)], By::Sum);
            }
            (O::MaxPool1d(x), O::MaxPool1d(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Any);
            }
            (O::MaxPool2d(x), O::MaxPool2d(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Any);
            }
            (O::MaxPool1dWithIndices(x), O::MaxPool1dWithIndices(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Any);
            }
            (O::MaxPool2dWithIndices(x), O::MaxPool2dWithIndices(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.inner(a, b, 2, By::Any);
            }
            (O::MaxPool1dWithIndicesBackward(x), O::MaxPool1dWithIndicesBackward(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.make(out, vec![leading(&x.indices, 2), leading(&x.grad, 2)], By::Selection);
            }
            (O::MaxPool2dWithIndicesBackward(x), O::MaxPool2dWithIndicesBackward(y)) if same!(x, y: kernel_size, stride, padding, dilation, ceil_mode) =>
            {
                self.make(out, vec![leading(&x.indices, 2), leading(&x.grad, 2)], By::Selection);
            }
            (O::Rfft(x), O::Rfft(y)) if same!(x, y: dim, n) => self.over(a, b, x.dim, By::Sum),
            (O::IRfft(x), O::IRfft(y)) if same!(x, y: dim, n) => self.over(a, b, x.dim, By::Sum),
            (O::Attention(x), O::Attention(y)) if same!(x, y: options) => {
                self.inner(a, b, 2, By::Any)
            }
            (O::CtcLoss(x), O::CtcLoss(y)) if same!(x, y: blank) => {
                let others = [&x.targets, &x.input_lengths, &x.target_lengths];
                let mut inputs = vec![only(&x.log_probs, 1, Goes::To(0))];
                inputs.extend(others.map(|tensor| leading(tensor, 1)));
                self.make(out, inputs, By::Any);
            }
            (O::CtcLossBackward(x), O::CtcLossBackward(y)) if same!(x, y: blank) => {
                let others = [&x.targets, &x.input_lengths, &x.target_lengths];
                let mut inputs =
                    vec![only(&x.grad_loss, 0, Goes::To(1)), only(&x.log_probs, 1, Goes::To(1))];
                inputs.extend(others.map(|tensor| only(tensor, 0, Goes::To(1))));
                self.make(out, inputs, By::First);
            }
            _ => return false,
        }
        true
    }

    /// Calls that burn-ir does not have, by their names: firebox describes some so.
    fn custom(
        &mut self,
        (a, b): (&OperationIr, &OperationIr),
        x: &CustomOpIr,
        y: &CustomOpIr,
    ) -> bool {
        let (name, rest) = x.id.split_once('(').unwrap_or((&x.id, ""));
        let first = rest.split([',', ')']).next().and_then(|first| first.trim().parse().ok());
        let is_sort = matches!(
            name,
            "float_sort"
                | "float_sort_with_indices"
                | "float_argsort"
                | "int_sort"
                | "int_sort_with_indices"
                | "int_argsort"
        );
        match (name, first) {
            ("float_to_device" | "int_to_device" | "bool_to_device", _) => self.all(a, b, By::Sum),
            (_, Some(dim)) if is_sort => self.over(a, b, dim, By::Any),
            ("ctc_loss" | "ctc_loss_backward", _) if x.inputs.len() >= 4 => {
                let (to, by) = match name {
                    "ctc_loss" => (0, By::Any),
                    _ => (1, By::First),
                };
                let at = |at: usize| if at == 0 { 1 } else { 0 };
                // Linear in the gradient of the loss, which comes last.
                let inputs = x.inputs.iter().enumerate().rev();
                let inputs = inputs.map(|(number, it)| only(it, at(number), Goes::To(to)));
                for out in Self::results(a, b) {
                    self.make(out, inputs.clone().collect(), by);
                }
            }
            _ => {
                let outs = Self::results(a, b);
                self.unknown(a, &outs, name.to_owned());
            }
        }
        x.id == y.id && x.inputs.len() == y.inputs.len() && x.outputs.len() == y.outputs.len()
    }
}
