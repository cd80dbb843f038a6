//! Follows the items through two recordings of a step, of two numbers of items.

use std::collections::{BTreeSet, HashMap, HashSet};

use burn_ir::{NumericOperationIr, OperationIr, ScalarIr, TensorIr};
use burn_std::Shape;
use firebox_trace::{Call, Category, Origin, Step, TensorIndex, Trace};

use crate::pairs::{ADD, Cut, Found, Others, computes};
use crate::value::{Axis, By, Kind, Root, Term, Terms, Value, collapsed, is_summed, terms_of};
use crate::{HostData, Recording};

/// A tensor in both recordings.
#[derive(Clone, Copy)]
pub(crate) struct Both<'b>(pub(crate) &'b TensorIr, pub(crate) &'b TensorIr);

impl<'b> Both<'b> {
    fn shapes(self) -> [&'b Shape; 2] {
        [&self.0.shape, &self.1.shape]
    }
}

/// What of a shape follows from the number of items.
#[derive(Clone, Copy)]
enum Items {
    None,
    /// One dimension, with so many slices of each item.
    In(Axis),
    /// Several, or one by another rule.
    Unclear,
}

const UNCLEAR: &str = "a size follows from the number of items";
const NONLINEAR: &str = "the operation is not linear in a sum over items";
const MEETS: &str = "a sum over items meets the items";
const EACH: &str = "a sum over items is given to each";
const PAIRED: &str = "items are paired with items";
const COMPARED: &str = "items are compared in a tensor of the batch";

fn scaled(one: &Shape, other: &Shape) -> Vec<usize> {
    (0..one.num_dims()).filter(|dim| other.get(*dim) != one.get(*dim)).collect()
}

/// What becomes of the items in a dimension of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goes {
    /// They are in this dimension of the result.
    To(usize),
    /// They add up. Operands with the same number have theirs in the same order.
    Adds(usize),
    /// They meet otherwise.
    Meets,
}

/// An operand: its value, and what becomes of items in each of its dimensions.
pub(crate) struct Operand<'v> {
    pub(crate) value: &'v Value,
    pub(crate) goes: Box<dyn Fn(usize) -> Goes + 'v>,
}

/// An operand whose dimensions are those of the result.
pub(crate) fn along(value: &Value) -> Operand<'_> {
    Operand { value, goes: Box::new(Goes::To) }
}

/// Where items met, and how.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    /// The step of the first recording.
    pub(crate) step: usize,
    pub(crate) name: String,
    pub(crate) why: &'static str,
}

impl Meeting {
    /// Whether each item depends on others then. Items that are put in another order, or picked by
    /// their places, may come back to theirs.
    pub(crate) fn is_certain(&self) -> bool {
        [NONLINEAR, MEETS, EACH, PAIRED, COMPARED].contains(&self.why)
    }
}

/// Why nothing is proved.
pub(crate) type Undecided = String;

pub(crate) type Rows<'a> = &'a dyn Fn(TensorIndex, TensorIndex) -> HostData;

pub(crate) struct Follow<'a> {
    traces: [&'a Trace; 2],
    pub(crate) n: [usize; 2],
    host: Rows<'a>,
    /// Whether pure tensors by item with numbers of the host in them are taken from the whole.
    takes_rows: bool,
    /// The tensors of the second recording.
    pub(crate) to_other: HashMap<TensorIndex, TensorIndex>,
    values: HashMap<TensorIndex, Value>,
    /// Those within a call, by their numbers in its description.
    locals: HashMap<u64, Value>,
    places: HashMap<u64, TensorIndex>,
    pub(crate) step: usize,
    pub(crate) name: String,
    pub(crate) met: Vec<Meeting>,
    /// The first call with a number of the host that was taken for the number of items.
    pub(crate) assumed: Option<String>,
    /// What occurs once for each batch and is added to a sum over items, and where.
    pub(crate) joins: Vec<(usize, Root)>,
    /// The steps with numbers of the host that are others in the part.
    pub(crate) sized: HashSet<usize>,
    /// Host data that the parts have as the whole has it.
    pub(crate) hosts: Vec<(TensorIndex, TensorIndex, HostData)>,
    /// The first operation without a rule.
    pub(crate) without_rule: Option<String>,
}

impl<'a> Follow<'a> {
    /// # Errors
    ///
    /// If the recordings are other programs.
    pub(crate) fn run(
        recordings: [&Recording<'a>; 2],
        host: Rows<'a>,
        takes_rows: bool,
    ) -> Result<Self, Undecided> {
        let [first, second] = recordings;
        let cuts = [Cut::of(first)?, Cut::of(second)?];
        let mut follow = Self {
            traces: [first.trace, second.trace],
            n: [first.items, second.items],
            host,
            takes_rows,
            to_other: HashMap::new(),
            values: HashMap::new(),
            locals: HashMap::new(),
            places: HashMap::new(),
            step: 0,
            name: String::new(),
            met: Vec::new(),
            assumed: None,
            joins: Vec::new(),
            sized: HashSet::new(),
            hosts: Vec::new(),
            without_rule: None,
        };
        follow.inputs(recordings, &cuts)?;
        let mut others = Others::new(&cuts[1], std::mem::take(&mut follow.to_other));
        for (at, step) in (cuts[0].first..).zip(cuts[0].steps) {
            if !computes(step) {
                continue;
            }
            follow.step = at;
            let found = others.take(first.trace, step, follow.n);
            let missing = || {
                format!(
                    "`{}` (operation {at}) has no counterpart on {} items",
                    step.name(),
                    follow.n[1]
                )
            };
            match (step, found.ok_or_else(missing)?) {
                (Step::Read(_), _) => return Err("the step reads values".to_owned()),
                (Step::Call(a), Found::Step(Step::Call(b))) => follow.call(a, b)?,
                (Step::Call(a), Found::Itself(shape)) => follow.alone(a, &shape, true)?,
                (Step::Call(a), Found::Partial(shape)) => follow.alone(a, &shape, false)?,
                (Step::Upload { output: a, .. }, Found::Step(Step::Upload { output: b, .. })) => {
                    follow.name = "upload".to_owned();
                    let shapes = [&first.trace.tensor(*a).shape, &second.trace.tensor(*b).shape];
                    let value = follow.of_host(shapes, (*a, *b));
                    follow.values.insert(*a, value);
                }
                _ => return Err(missing()),
            }
        }
        if let Some(more) = others.rest() {
            return Err(format!("`{more}` only occurs on {} items", follow.n[1]));
        }
        follow.to_other = others.to_other;
        Ok(follow)
    }

    /// Where items are in a tensor of these shapes.
    fn items(&self, [one, other]: [&Shape; 2]) -> Items {
        match scaled(one, other)[..] {
            [] => Items::None,
            [dim] => {
                let inner = one[dim] / self.n[0];
                let fits = inner * self.n[0] == one[dim] && inner * self.n[1] == other[dim];
                if fits { Items::In(Axis::of_items(dim, inner)) } else { Items::Unclear }
            }
            _ => Items::Unclear,
        }
    }

    pub(crate) fn value(&self, tensor: TensorIndex) -> Option<&Value> {
        self.values.get(&tensor)
    }

    /// What is known about tensors that existed before.
    fn inputs(
        &mut self,
        recordings: [&Recording<'a>; 2],
        cuts: &[Cut<'a>; 2],
    ) -> Result<(), Undecided> {
        let [first, second] = recordings;
        let others: HashMap<u64, TensorIndex> = second.inputs.iter().copied().collect();
        for (id, tensor) in &first.inputs {
            // What the other never uses is used by nothing.
            let Some(other) = others.get(id) else { continue };
            let (a, b) = (cuts[0].shape(*tensor), cuts[1].shape(*other));
            let label = first.trace.tensor(*tensor).label.as_ref();
            let pure = label.is_none_or(|label| label.category != Category::Parameter);
            let kind = match self.items([a, b]) {
                Items::None => Kind::Fixed(BTreeSet::new()),
                Items::In(axis) => Kind::ByItem(axis, no_terms()),
                Items::Unclear => {
                    return Err("a tensor of the batch has no dimension of items".to_owned());
                }
            };
            let root = Root::of(*tensor, a.num_elements());
            let value = Value { root, ..Value::new(kind, pure) };
            self.values.insert(*tensor, value);
            self.to_other.insert(*tensor, *other);
        }
        let known = |at: usize, of: &Recording<'_>| {
            let existed = of.trace.existing().count();
            if existed == of.inputs.len() {
                Ok(())
            } else {
                Err(format!("recording {at} has inputs that are not told"))
            }
        };
        known(0, first).and(known(1, second))
    }

    /// Host data of a call or an upload.
    fn of_host(&mut self, shapes: [&Shape; 2], tensors: (TensorIndex, TensorIndex)) -> Value {
        let root = Root::of(tensors.0, shapes[0].num_elements());
        let data = (self.host)(tensors.0, tensors.1);
        let given = BTreeSet::from([root]);
        // A sequence follows from its length.
        let is_sequence = self.name.starts_with("int_arange") && data == HostData::Same;
        if data != HostData::Other && !is_sequence {
            self.hosts.push((tensors.0, tensors.1, data));
        }
        let kind = match (self.items(shapes), data) {
            (Items::None, HostData::Same) => Kind::Fixed(BTreeSet::new()),
            (Items::None, _) => Kind::Fixed(given),
            (Items::In(axis), HostData::Rows) => Kind::ByItem(axis, no_terms()),
            (Items::In(axis), _) => Kind::ByItem(axis, [Term::of(given)].into()),
            (Items::Unclear, _) => {
                Kind::Mixed(self.meet("data of the host has no dimension of items"))
            }
        };
        Value { root, ..Value::new(kind, true) }
    }

    fn call(&mut self, a: &Call, b: &Call) -> Result<(), Undecided> {
        self.name = a.name.to_string();
        let (x, y) = (self.traces[0].description(a), self.traces[1].description(b));
        let operations = |of: &'a firebox_trace::Description| {
            of.operations.iter().filter(|it| !matches!(it, OperationIr::Drop(_)))
        };
        if operations(x).count() != operations(y).count() || a.inputs.len() != b.inputs.len() {
            return Err(format!("`{}` does something else on {} items", a.name, self.n[1]));
        }
        // Of a commutative call, the operands may have changed places: shapes are told apart only.
        let inputs = (0..).zip(&a.inputs);
        let values = inputs.map(|(at, input)| Some((at, self.values.get(&input.tensor)?.clone())));
        let values: Option<HashMap<u64, Value>> = values.collect();
        self.locals = values.ok_or_else(|| format!("`{}` works on an unknown tensor", a.name))?;
        self.places = x.outputs.iter().copied().zip(a.outputs.iter().copied()).collect();
        let others: HashMap<u64, TensorIndex> =
            x.outputs.iter().copied().zip(b.outputs.iter().copied()).collect();
        for (one, other) in operations(x).zip(operations(y)) {
            if let (OperationIr::Init(one), OperationIr::Init(other)) = (one, other) {
                let place = (self.places.get(&one.out.id.value()), others.get(&one.out.id.value()));
                let value = match place {
                    (Some(a), Some(b)) => {
                        self.of_host([&one.out.shape, &other.out.shape], (*a, *b))
                    }
                    _ => return Err(format!("`{}` has data of the host within", a.name)),
                };
                self.set(Both(&one.out, &other.out), value);
                continue;
            }
            self.operation(one, other)?;
        }
        for (local, tensor) in x.outputs.iter().zip(&a.outputs) {
            let value = self.locals.get(local).cloned();
            let value = value.ok_or_else(|| format!("`{}` has no result", a.name))?;
            self.values.insert(*tensor, value);
        }
        Ok(())
    }

    /// A call without a counterpart, whose result has this shape on the other's items: a sum over a
    /// dimension, or of two tensors.
    fn alone(&mut self, call: &Call, other: &Shape, over: bool) -> Result<(), Undecided> {
        let mut operations = self.traces[0].description(call).operations.iter();
        let operation = operations.find(|it| !matches!(it, OperationIr::Drop(_)));
        self.name = call.name.to_string();
        let values = call.inputs.iter().filter_map(|input| self.values.get(&input.tensor).cloned());
        let values: Vec<Value> = values.collect();
        let Some(out) = operation.and_then(|operation| operation.outputs().next()) else {
            return Err(format!("`{}` has no result", call.name));
        };
        self.places = [(out.id.value(), call.outputs[0])].into();
        let both = TensorIr { shape: other.clone(), ..out.clone() };
        let both = Both(out, &both);
        match (operation, over, &values[..]) {
            (
                Some(OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum))),
                true,
                [value],
            ) => {
                self.reduce(value, both, Some(sum.axis), Some(false));
            }
            (_, false, [one, other]) => {
                let made = self.elementwise(both, &[one, other], By::Sum);
                self.set(both, made);
            }
            _ => return Err(format!("`{}` is no sum", call.name)),
        }
        let made = self.locals[&out.id.value()].clone();
        self.values.insert(call.outputs[0], made);
        Ok(())
    }

    /// The value of a tensor within the call.
    pub(crate) fn get(&self, tensor: &TensorIr) -> Value {
        self.locals
            .get(&tensor.id.value())
            .cloned()
            .expect("a trace makes tensors before it uses them")
    }

    /// Stores a result, if it has the shape that it should.
    pub(crate) fn set(&mut self, out: Both<'_>, value: Value) {
        let local = out.0.id.value();
        let root = match self.places.get(&local) {
            Some(tensor) => Root::of(*tensor, out.0.shape.num_elements()),
            None => Root::Inside((self.step as u32) << 6 | local as u32 & 63),
        };
        let dims = scaled(&out.0.shape, &out.1.shape);
        let is_sound = match &value.kind {
            Kind::Fixed(_) | Kind::Sum { .. } => dims.is_empty(),
            Kind::ByItem(axis, _) => {
                let slices = axis.outer * axis.inner;
                let has = |at: usize, tensor: &TensorIr| {
                    tensor.shape.get(axis.dim) == Some(&(slices * self.n[at]))
                };
                dims == [axis.dim] && has(0, out.0) && has(1, out.1)
            }
            Kind::Mixed(_) => true,
        };
        let mut value = match is_sound {
            true => value,
            false => self.mix(out, value.pure, UNCLEAR),
        };
        // What depends on the batch alone stands for itself.
        let pure = value.pure;
        match &mut value.kind {
            Kind::Fixed(given) if pure && !given.is_empty() => *given = [root].into(),
            Kind::ByItem(_, terms) if terms.iter().any(|term| term.given.contains(&OWN)) => {
                *terms = [Term::of([root].into())].into();
            }
            Kind::Sum { terms, .. } if pure => {
                let through = |mut term: Term| {
                    term.through.insert(root);
                    term
                };
                *terms = std::mem::take(terms).into_iter().map(through).collect();
            }
            _ => {}
        }
        value.root = root;
        self.locals.insert(local, value);
    }

    fn meet(&mut self, why: &'static str) -> usize {
        self.met.push(Meeting { step: self.step, name: self.name.clone(), why });
        self.met.len() - 1
    }

    /// A tensor of the batch alone, which is taken from the whole batch: all of it, or the rows of
    /// the items.
    fn of_whole(&self, out: Both<'_>) -> Option<Value> {
        let own = BTreeSet::from([OWN]);
        let kind = match self.items(out.shapes()) {
            Items::None => Kind::Fixed(own),
            Items::In(axis) => Kind::ByItem(axis, [Term::of(own)].into()),
            Items::Unclear => return None,
        };
        Some(Value::new(kind, true))
    }

    /// A result in which items meet.
    pub(crate) fn mix(&mut self, out: Both<'_>, pure: bool, why: &'static str) -> Value {
        match self.of_whole(out) {
            Some(value) if pure => value,
            _ => Value::new(Kind::Mixed(self.meet(why)), pure),
        }
    }

    /// The result, if an operand is mixed.
    pub(crate) fn after_mixed(&mut self, out: Both<'_>, values: &[&Value]) -> Option<Value> {
        let pure = values.iter().all(|value| value.pure);
        let met = values.iter().find_map(|value| match value.kind {
            Kind::Mixed(met) => Some((met, value.pure)),
            _ => None,
        });
        let (met, of_batch) = met?;
        Some(match (pure, of_batch) {
            (true, _) => self.of_whole(out).unwrap_or(Value::new(Kind::Mixed(met), true)),
            (false, true) => self.mix(out, false, COMPARED),
            (false, false) => Value::new(Kind::Mixed(met), false),
        })
    }

    /// The result of an operation of which only the operands are known.
    pub(crate) fn opaque(&mut self, out: Both<'_>, values: &[&Value], why: &'static str) -> Value {
        if let Some(mixed) = self.after_mixed(out, values) {
            return mixed;
        }
        let pure = values.iter().all(|value| value.pure);
        let factors: Option<Vec<BTreeSet<Root>>> =
            values.iter().map(|value| value.factor()).collect();
        match factors {
            Some(factors) => Value::new(Kind::Fixed(factors.into_iter().flatten().collect()), pure),
            None => self.mix(out, pure, why),
        }
    }

    /// The result of an operation on elements.
    pub(crate) fn elementwise(&mut self, out: Both<'_>, values: &[&Value], by: By) -> Value {
        let operands: Vec<Operand<'_>> = values.iter().map(|value| along(value)).collect();
        let mut made = self.combine(out, &operands, by);
        if let Kind::ByItem(axis, _) = &mut made.kind {
            axis.uniform = values.iter().all(|value| value.axis().is_some_and(|axis| axis.uniform));
        }
        made.zero = by == By::Sum && values.iter().all(|value| value.zero);
        made
    }

    /// The result of an operation on these operands.
    pub(crate) fn combine(&mut self, out: Both<'_>, operands: &[Operand<'_>], by: By) -> Value {
        let values: Vec<&Value> = operands.iter().map(|operand| operand.value).collect();
        if let Some(mixed) = self.after_mixed(out, &values) {
            return mixed;
        }
        let pure = values.iter().all(|value| value.pure);
        let mut found: Option<(Goes, Axis)> = None;
        for operand in operands {
            let Some(axis) = operand.value.axis() else { continue };
            let goes = (operand.goes)(axis.dim);
            if goes == Goes::Meets {
                return self.mix(out, pure, "the operation works across items");
            }
            found = match found {
                Some((other, _)) if other != goes => {
                    return self.mix(out, pure, PAIRED);
                }
                Some((_, of)) if axis.free => Some((goes, of)),
                Some((_, of)) if !of.free && (of.outer, of.inner) != (axis.outer, axis.inner) => {
                    return self.mix(out, pure, "items are paired in another order");
                }
                _ => Some((goes, axis)),
            };
        }
        let Some((goes, axis)) = found else { return self.without_items(out, &values, by) };
        if values.iter().any(|value| value.is_open_sum()) {
            return self.mix(out, pure, MEETS);
        }
        let terms = terms_of(&values, by, self.takes_rows);
        match goes {
            Goes::To(dim) => {
                let free = values.iter().all(|value| value.axis().is_none_or(|axis| axis.free));
                Value::new(Kind::ByItem(Axis { dim, free, uniform: false, ..axis }, terms), pure)
            }
            Goes::Adds(_) if by != By::Any => {
                Value::new(Kind::Sum { terms, once: false, given: None }, pure)
            }
            _ => self.mix(out, pure, "the operation works across items"),
        }
    }

    /// The result of an operation on operands without items.
    fn without_items(&mut self, out: Both<'_>, values: &[&Value], by: By) -> Value {
        let pure = values.iter().all(|value| value.pure);
        let is_sum = |value: &Value| is_summed(value, values, by);
        let sums = values.iter().filter(|value| is_sum(value)).count();
        let is_linear = match by {
            By::Sum => true,
            By::Product => sums == 1,
            By::Quotient | By::First => sums == 1 && is_sum(values[0]),
            By::Selection => values[0].factor().is_some_and(|given| given.is_empty()),
            By::Any => false,
        };
        if sums == 0 || !is_linear {
            return self.opaque(out, values, NONLINEAR);
        }
        let given: Option<Vec<BTreeSet<Root>>> =
            values.iter().map(|value| value.factor()).collect();
        let given = given.map(|given| given.into_iter().flatten().collect());
        let mut once = values
            .iter()
            .any(|value| matches!(value.kind, Kind::Sum { once: true, .. }) && is_sum(value));
        let (mut summands, mut added) = (values.to_vec(), Terms::new());
        if matches!(by, By::Sum | By::Selection) {
            let selects = usize::from(by == By::Selection);
            let others = values[selects..].iter().filter(|value| !is_sum(value) && !value.zero);
            for other in others {
                once = true;
                self.joins.push((self.step, other.root));
                // What is added once may follow from the batch.
                added.extend(other.factor().filter(|given| !given.is_empty()).map(Term::of));
            }
            let mut at = 0;
            summands.retain(|value| {
                at += 1;
                at <= selects || is_sum(value)
            });
        }
        let mut terms = terms_of(&summands, by, self.takes_rows);
        terms.extend(added);
        let mut kind = Kind::Sum { terms, once, given };
        let scales = |value: &&Value| {
            !is_sum(value) && value.factor().is_some_and(|given| !given.is_empty())
        };
        if !matches!(by, By::Sum | By::Selection) && values.iter().any(scales) {
            scale_once(&mut kind);
        }
        Value::new(kind, pure)
    }

    /// A sum or mean over a dimension or all, or something else that is neither (`mean` is `None`).
    pub(crate) fn reduce(
        &mut self,
        value: &Value,
        out: Both<'_>,
        dim: Option<usize>,
        mean: Option<bool>,
    ) {
        let over = |of: usize| dim.is_none_or(|dim| dim == of);
        let goes = move |of: usize| match (over(of), mean) {
            (false, _) => Goes::To(of),
            (true, Some(_)) => Goes::Adds(0),
            (true, None) => Goes::Meets,
        };
        let by = if mean.is_some() { By::Sum } else { By::Any };
        let mut made = self.combine(out, &[Operand { value, goes: Box::new(goes) }], by);
        if let (Some(true), Some(axis), Kind::Sum { terms, .. }) =
            (mean, value.axis(), &mut made.kind)
            && over(axis.dim)
        {
            *terms = terms.iter().map(|term| term.clone().scaled(Root::Items, -1)).collect();
        }
        self.set(out, made);
    }

    /// What a number on the host stands for, and with which exponent. `None`: it is the same.
    fn scalar(&mut self, a: ScalarIr, b: ScalarIr) -> Option<(Root, i32)> {
        let ([x, y], [n, m]) = ([a.elem::<f64>(), b.elem()], self.n.map(|n| n as f64));
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        if a == b {
            return None;
        }
        self.sized.insert(self.step);
        match () {
            () if near(x / n, y / m) => Some((Root::Items, 1)),
            () if near(x * n, y * m) => Some((Root::Items, -1)),
            () => Some((Root::Inside(self.step as u32), 1)),
        }
    }

    /// What a number on the host is, whatever its exponent.
    pub(crate) fn number(&mut self, a: ScalarIr, b: ScalarIr) -> Value {
        let root = self.scalar(a, b).map(|(root, _)| root);
        Value::number(root, root.is_none() && a.elem::<f64>() == 0.0)
    }

    /// An operation on elements and a number of the host.
    pub(crate) fn with_number(
        &mut self,
        value: &Value,
        (a, b): (ScalarIr, ScalarIr),
        out: Both<'_>,
        by: By,
    ) {
        // Autodiff divides ones by the elements that a mean is over, which is always right.
        let is_of_shape = |number: ScalarIr, shape: &Shape| {
            let number = number.elem::<f64>();
            let sizes = shape.iter().copied().chain([shape.num_elements()]);
            sizes.into_iter().any(|size| (number * size as f64 - 1.0).abs() < 1e-6)
        };
        let is_even = value.axis().map_or(!value.is_sum(), |axis| axis.uniform);
        let is_size = is_even && is_of_shape(a, &out.0.shape) && is_of_shape(b, &out.1.shape);
        let scaled = |term: Term, power: i32| Term {
            assumed: term.assumed || !is_size,
            ..term.scaled(Root::Items, power)
        };
        let is_n = matches!(self.scalar(a, b), Some((Root::Items, _)));
        if is_n && !is_size {
            self.assumed.get_or_insert_with(|| self.name.clone());
        }
        let made = match (self.scalar(a, b), by) {
            // Times a constant.
            (None, By::Product | By::Quotient) => self.elementwise(out, &[value], By::Sum),
            // So much for each item, as the share of the batch is.
            (Some((Root::Items, power)), By::Product | By::Quotient)
                if matches!(value.kind, Kind::Fixed(_))
                    && power == if by == By::Product { 1 } else { -1 } =>
            {
                let term = Term::of(value.factor().unwrap_or_default());
                let terms = [scaled(term, 0)].into();
                Value::new(Kind::Sum { terms, once: false, given: None }, value.pure)
            }
            // Times the number of items, or divided by it.
            (Some((Root::Items, power)), By::Product | By::Quotient)
                if matches!(value.kind, Kind::ByItem(..) | Kind::Sum { .. }) =>
            {
                let power = if by == By::Product { power } else { -power };
                let mut made = self.elementwise(out, &[value], By::Sum);
                if let Kind::Sum { given: Some(given), .. } = &mut made.kind {
                    given.insert(Root::Items);
                }
                if let Kind::ByItem(_, terms) | Kind::Sum { terms, .. } = &mut made.kind {
                    *terms = terms.iter().map(|term| scaled(term.clone(), power)).collect();
                }
                scale_once(&mut made.kind);
                made
            }
            _ => {
                let root = self.scalar(a, b).map(|(root, _)| root);
                let number = Value::number(root, root.is_none() && a.elem::<f64>() == 0.0);
                self.elementwise(out, &[value, &number], by)
            }
        };
        self.set(out, made);
    }

    /// The same elements in other places. `place` says where items of an axis are then.
    pub(crate) fn moved(
        &mut self,
        value: &Value,
        out: Both<'_>,
        place: impl Fn(Axis) -> Option<Axis>,
    ) {
        let made = match &value.kind {
            Kind::ByItem(axis, terms) => match place(*axis) {
                Some(axis) => Value::new(Kind::ByItem(axis, terms.clone()), value.pure),
                None => self.mix(out, value.pure, "items are told apart by their places"),
            },
            Kind::Mixed(_) => self.after_mixed(out, &[value]).expect("it is mixed"),
            kind => Value::new(kind.clone(), value.pure),
        };
        self.set(out, Value { zero: value.zero, ..made });
    }

    pub(crate) fn reshape(&mut self, value: &Value, input: Both<'_>, out: Both<'_>) {
        let (n, items) = (self.n, self.items(out.shapes()));
        self.moved(value, out, |axis| {
            if axis.uniform {
                let Items::In(axis) = items else { return None };
                return Some(Axis { uniform: true, free: true, ..axis });
            }
            (0..out.0.shape.num_dims()).find_map(|dim| {
                let first = reshaped(axis, &input.0.shape, (&out.0.shape, dim), n[0])?;
                let second = reshaped(axis, &input.1.shape, (&out.1.shape, dim), n[1])?;
                let stays = (first.outer, first.inner) == (axis.outer, axis.inner);
                (first == second).then_some(Axis { free: axis.free && stays, ..first })
            })
        });
    }

    pub(crate) fn expand(&mut self, value: &Value, input: &TensorIr, out: Both<'_>) {
        let more = out.0.shape.num_dims() - input.shape.num_dims();
        let is_single = input.shape.num_elements() == 1;
        let made = match (&value.kind, self.items(out.shapes())) {
            (Kind::ByItem(axis, terms), _) => {
                let axis = Axis { dim: axis.dim + more, ..*axis };
                Value::new(Kind::ByItem(axis, terms.clone()), value.pure)
            }
            (Kind::Mixed(_), _) => self.after_mixed(out, &[value]).expect("it is mixed"),
            (kind, Items::None) => Value::new(kind.clone(), value.pure),
            (_, Items::In(axis)) => match value.factor() {
                Some(given) => {
                    let axis = Axis { uniform: is_single, free: true, ..axis };
                    let term = match value.pure && !given.is_empty() {
                        true => Term::default().scaled(value.root, 1),
                        false => Term::of(given),
                    };
                    Value::new(Kind::ByItem(axis, [term].into()), value.pure)
                }
                None => self.mix(out, value.pure, EACH),
            },
            _ => self.mix(out, value.pure, UNCLEAR),
        };
        self.set(out, Value { zero: value.zero, ..made });
    }

    /// A tensor of equal numbers, or of random ones.
    pub(crate) fn create(
        &mut self,
        out: Both<'_>,
        root: Option<Root>,
        is_random: bool,
        zero: bool,
    ) {
        let given: BTreeSet<Root> = root.into_iter().collect();
        let made = match self.items(out.shapes()) {
            Items::None => Value::new(Kind::Fixed(given), !is_random),
            Items::In(axis) => {
                let axis = Axis { uniform: !is_random, free: !is_random, ..axis };
                Value::new(Kind::ByItem(axis, [Term::of(given)].into()), !is_random)
            }
            Items::Unclear => self.mix(out, !is_random, UNCLEAR),
        };
        self.set(out, Value { zero, ..made });
    }

    /// The number of rounds of items in a part of their dimension, if they are whole.
    pub(crate) fn rounds(&self, axis: Axis, parts: [(usize, usize); 2]) -> Option<usize> {
        let of = |at: usize| {
            let ((start, len), round) = (parts[at], self.n[at] * axis.inner);
            let is_whole = start.is_multiple_of(round) && len.is_multiple_of(round);
            is_whole.then(|| (start / round, len / round))
        };
        let (one, other) = (of(0)?, of(1)?);
        (one == other).then_some(one.1)
    }

    /// An operation that has no rule.
    pub(crate) fn unknown(&mut self, operation: &OperationIr, outs: &[Both<'_>], what: String) {
        self.without_rule.get_or_insert(what);
        let values: Vec<Value> = operation.inputs().map(|tensor| self.get(tensor)).collect();
        let values: Vec<&Value> = values.iter().collect();
        for out in outs {
            let made = self.opaque(*out, &values, "the operation is not known");
            self.set(*out, made);
        }
    }

    /// The sum over items, a single number, through which alone the batch determines these tensors
    /// beside what belongs to each item. Those of several batches add up.
    pub(crate) fn sum_behind(&self, tensors: Vec<TensorIndex>) -> Option<TensorIndex> {
        let trace = self.traces[0];
        let (mut sum, mut next, mut seen) = (None, tensors, HashSet::new());
        while let Some(tensor) = next.pop() {
            if !seen.insert(tensor) {
                continue;
            }
            match &self.value(tensor)?.kind {
                Kind::Sum { terms, once: false, .. } => {
                    let is_plain = |term: &Term| term.roots().next().is_none() && !term.assumed;
                    let is_one = trace.tensor(tensor).shape.num_elements() == 1;
                    if !is_one
                        || !terms.iter().all(is_plain)
                        || sum.replace(tensor).is_some_and(|other| other != tensor)
                    {
                        return None;
                    }
                    continue;
                }
                Kind::Fixed(given) if given.is_empty() => continue,
                Kind::ByItem(_, terms) if terms.iter().flat_map(Term::roots).next().is_none() => {
                    continue;
                }
                Kind::ByItem(_, terms) if terms.iter().any(|term| !term.given.is_empty()) => {
                    return None;
                }
                Kind::Sum { .. } | Kind::Fixed(_) | Kind::ByItem(..) => {}
                Kind::Mixed(_) => return None,
            }
            let Origin::Made(at) = trace.tensor(tensor).origin else { return None };
            let inputs = trace.steps[at.0 as usize].inputs().iter().map(|input| input.tensor);
            let inputs: Vec<TensorIndex> = inputs.collect();
            let has_items = |of: TensorIndex| self.value(of).is_none_or(|it| it.axis().is_some());
            let meets = !has_items(tensor) && inputs.iter().any(|input| has_items(*input));
            if inputs.is_empty() || meets || self.sized.contains(&(at.0 as usize)) {
                return None;
            }
            next.extend(inputs);
        }
        sum
    }

    /// The tensors that are added to sums over items and occur once for each batch, in both
    /// recordings, with these `others`. `None` if one cannot be nothing in a part without another
    /// effect.
    pub(crate) fn once(
        &self,
        others: Vec<TensorIndex>,
        outputs: &[TensorIndex],
    ) -> Option<Vec<[TensorIndex; 2]>> {
        let trace = self.traces[0];
        let joined = self.joins.iter().map(|(_, root)| match root {
            Root::Number(tensor) | Root::Tensor(tensor) => Some(*tensor),
            Root::Items | Root::Inside(_) => None,
        });
        let joins = joined.collect::<Option<Vec<TensorIndex>>>()?;
        if joins.iter().any(|join| outputs.contains(join)) || !self.joins_stay_sums() {
            return None;
        }
        let times = |tensor| joins.iter().filter(|join| **join == tensor).count();
        let all: BTreeSet<TensorIndex> = joins.iter().copied().chain(others).collect();
        let mut next: Vec<(TensorIndex, usize)> =
            all.into_iter().map(|tensor| (tensor, times(tensor))).collect();
        let inputs = || trace.steps.iter().flat_map(Step::inputs).map(|input| input.tensor);
        let mut once = Vec::new();
        while let Some((tensor, joined)) = next.pop() {
            let Origin::Made(at) = trace.tensor(tensor).origin else { return None };
            if inputs().filter(|input| *input == tensor).count() != joined {
                return None;
            }
            let step = &trace.steps[at.0 as usize];
            match self.to_other.get(&tensor) {
                Some(other) => once.push([tensor, *other]),
                // Its summands are added in another order there.
                None if step.name() == ADD => {
                    next.extend(step.inputs().iter().map(|input| (input.tensor, 1)));
                }
                None => return None,
            }
        }
        Some(once)
    }

    /// Whether nothing but sums is made of those to which something is added once: a factor would
    /// need all of it in each part.
    fn joins_stay_sums(&self) -> bool {
        let trace = self.traces[0];
        let kind = |tensor: &TensorIndex| self.value(*tensor).map(|value| &value.kind);
        let mut made: BTreeSet<TensorIndex> = BTreeSet::new();
        for (at, step) in trace.steps.iter().enumerate() {
            let uses = step.inputs().iter().filter(|input| made.contains(&input.tensor)).count();
            let joins = self.joins.iter().any(|(join, _)| *join == at);
            if uses == 0 && !joins {
                continue;
            }
            let inputs = step.inputs().iter().map(|input| kind(&input.tensor));
            let sums = inputs.filter(|kind| matches!(kind, Some(Kind::Sum { .. }))).count();
            let is_sum = |of: &TensorIndex| matches!(kind(of), Some(Kind::Sum { once: true, .. }));
            if !step.outputs().iter().all(is_sum) || sums > 1 && step.name() != ADD {
                return false;
            }
            made.extend(step.outputs());
        }
        true
    }

    /// The path of the module whose parameters were used last before a step.
    pub(crate) fn module_before(&self, step: usize) -> Option<String> {
        let trace = self.traces[0];
        let calls = trace.steps[..=step].iter().rev().filter_map(|step| match step {
            Step::Call(call) => Some(call),
            _ => None,
        });
        let mut used =
            calls.flat_map(|call| call.inputs.iter().map(|input| trace.tensor(input.tensor)));
        used.find_map(|tensor| {
            let label = tensor.label.as_ref().filter(|it| {
                it.category == Category::Parameter && tensor.origin == Origin::Existing
            })?;
            label.name.rsplit_once('.').map(|(module, _)| module.to_owned())
        })
    }
}

/// What is added once for each batch is not once any more if the whole batch scales it. Nothing is
/// proved of it then.
fn scale_once(kind: &mut Kind) {
    if let Kind::Sum { terms, once: true, .. } = kind {
        terms.insert(Term::of([Root::Items].into()));
    }
}

/// Stands for the tensor that is being made.
const OWN: Root = Root::Inside(u32::MAX);

fn no_terms() -> Terms {
    collapsed([])
}

/// The items of an axis after a reshape, if they are in this dimension.
fn reshaped(axis: Axis, from: &Shape, (to, dim): (&Shape, usize), n: usize) -> Option<Axis> {
    let product = |dims: &[usize]| dims.iter().product::<usize>();
    let before = product(&from[..axis.dim]) * axis.outer;
    let behind = axis.inner * product(&from[axis.dim + 1..]);
    let (a, c) = (product(&to[..dim]).max(1), product(&to[dim + 1..]).max(1));
    let fits = before.is_multiple_of(a)
        && behind.is_multiple_of(c)
        && before / a * n * (behind / c) == to[dim];
    let (outer, inner) = (before / a, behind / c);
    fits.then_some(Axis { dim, outer, inner, uniform: false, free: false })
}
