//! What the items of a batch are to a tensor.

use std::collections::{BTreeMap, BTreeSet};

use firebox_trace::TensorIndex;

/// A number or tensor of the whole batch that a result depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Root {
    /// The number of items.
    Items,
    /// A tensor of the trace that depends on the batch alone: a single number.
    Number(TensorIndex),
    /// The same with several numbers.
    Tensor(TensorIndex),
    /// What only exists within a call, or a number of the host that follows from the batch in an
    /// unknown way, at this step.
    Inside(u32),
}

impl Root {
    /// A tensor of the trace with so many elements.
    pub(crate) fn of(tensor: TensorIndex, elements: usize) -> Self {
        if elements == 1 { Self::Number(tensor) } else { Self::Tensor(tensor) }
    }

    /// Whether a product with it divided by it is what it was: several numbers may meet others of
    /// them.
    fn cancels(self) -> bool {
        matches!(self, Self::Items | Self::Number(_))
    }
}

/// A summand: by which of its powers a factor of the whole batch's numbers scales it, and on what
/// else of the whole batch it depends.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Term {
    pub(crate) scale: BTreeMap<Root, i32>,
    pub(crate) given: BTreeSet<Root>,
    /// Sums over items of the batch alone that it is, or is made of. Parts add them up, and are not
    /// to be given the whole batch's.
    pub(crate) through: BTreeSet<Root>,
    /// Whether a number of the host was taken for the number of items. In another batch it may be
    /// another.
    pub(crate) assumed: bool,
}

impl Term {
    pub(crate) fn of(given: BTreeSet<Root>) -> Self {
        Self { given, ..Self::default() }
    }

    pub(crate) fn roots(&self) -> impl Iterator<Item = Root> {
        self.scale.keys().chain(&self.given).copied()
    }

    /// The exponent of a root.
    pub(crate) fn power(&self, of: Root) -> i32 {
        self.scale.get(&of).copied().unwrap_or(0)
    }

    pub(crate) fn scaled(mut self, by: Root, power: i32) -> Self {
        let now = self.scale.entry(by).or_insert(0);
        *now += power;
        if *now == 0 && by.cancels() {
            self.scale.remove(&by);
        }
        self
    }

    fn times(&self, other: &Self) -> Self {
        let mut term = self.clone();
        term.given.extend(&other.given);
        term.through.extend(&other.through);
        term.assumed |= other.assumed;
        other.scale.iter().fold(term, |term, (root, power)| term.scaled(*root, *power))
    }
}

pub(crate) type Terms = BTreeSet<Term>;

/// All products of two sums.
pub(crate) fn products(one: &Terms, other: &Terms) -> Terms {
    one.iter().flat_map(|a| other.iter().map(|b| a.times(b))).collect()
}

/// A single term that depends on everything that these do.
pub(crate) fn collapsed<'a>(terms: impl IntoIterator<Item = &'a Term>) -> Terms {
    let mut all = Term::default();
    for term in terms {
        all.given.extend(term.roots());
        all.through.extend(&term.through);
        all.assumed |= term.assumed;
    }
    [all].into()
}

/// The dimension that holds the items: of `outer * items * inner` slices, `inner` of each item in
/// each of `outer` rounds. Item `i` has slices `(o * items + i) * inner + j`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    pub(crate) dim: usize,
    pub(crate) outer: usize,
    pub(crate) inner: usize,
    /// All elements of the tensor are the same number.
    pub(crate) uniform: bool,
    /// Nothing changes along the dimension, so that every order of its slices is right.
    pub(crate) free: bool,
}

impl Axis {
    pub(crate) fn of_items(dim: usize, inner: usize) -> Self {
        Self { dim, outer: 1, inner, uniform: false, free: false }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// The same for all batches, but for these.
    Fixed(BTreeSet<Root>),
    /// A slice for each item, which depends on that item alone, but for these.
    ByItem(Axis, Terms),
    /// A sum over the items. `once`: and what is added once for each batch.
    Sum {
        terms: Terms,
        once: bool,
        /// What of the whole batch it would have to be given to be fixed, if that is possible.
        given: Option<BTreeSet<Root>>,
    },
    /// Items have met: the number of the meeting.
    Mixed(usize),
}

/// What is known about a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub(crate) kind: Kind,
    /// Depends on the batch and on constants alone.
    pub(crate) pure: bool,
    /// All elements are zero.
    pub(crate) zero: bool,
    pub(crate) root: Root,
}

impl Value {
    pub(crate) fn new(kind: Kind, pure: bool) -> Self {
        Self { kind, pure, zero: false, root: Root::Items }
    }

    /// A number on the host.
    pub(crate) fn number(root: Option<Root>, zero: bool) -> Self {
        let kind = Kind::Fixed(root.into_iter().collect());
        Self { kind, pure: true, zero, root: root.unwrap_or(Root::Items) }
    }

    /// What it depends on where it is a factor without items. `None` if it is none.
    pub(crate) fn factor(&self) -> Option<BTreeSet<Root>> {
        match &self.kind {
            Kind::Fixed(given) if given.is_empty() || !self.pure => Some(given.clone()),
            // It stands for itself.
            Kind::Fixed(_) | Kind::Sum { .. } if self.pure => Some([self.root].into()),
            Kind::Sum { given, .. } => given.clone(),
            _ => None,
        }
    }

    pub(crate) fn axis(&self) -> Option<Axis> {
        match self.kind {
            Kind::ByItem(axis, _) => Some(axis),
            _ => None,
        }
    }

    pub(crate) fn is_sum(&self) -> bool {
        matches!(self.kind, Kind::Sum { .. })
    }

    /// Whether it is a sum over items that cannot be a factor.
    pub(crate) fn is_open_sum(&self) -> bool {
        self.is_sum() && self.factor().is_none()
    }
}

/// How an operation depends on its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// In any way.
    Any,
    /// As a sum of them.
    Sum,
    /// As a product of them.
    Product,
    /// As a quotient of the first and the others.
    Quotient,
    /// As a sum of all but the first, which selects.
    Selection,
    /// As a product with the first, and on the others in any way.
    First,
}

/// Whether a sum over items is one in an operation: next to items it is a factor, if it can, and in
/// a product next to a sum that cannot.
pub(crate) fn is_summed(value: &Value, values: &[&Value], by: By) -> bool {
    let adds = matches!(by, By::Sum | By::Selection);
    let is_factor = |other: &&Value| other.axis().is_some() || (!adds && other.is_open_sum());
    value.is_open_sum() || (value.is_sum() && !values.iter().any(is_factor))
}

/// The terms of a result that is by item, or a sum over the items of such results. Where `rows` is
/// set, a pure operand with numbers of the host in it is taken from the whole batch.
pub(crate) fn terms_of(values: &[&Value], by: By, rows: bool) -> Terms {
    let all_pure = values.iter().all(|value| value.pure);
    let is_summed = |value: &Value| is_summed(value, values, by);
    // What depends on the batch alone, and is given.
    let stands_for_itself = |value: &Value| match &value.kind {
        Kind::ByItem(_, terms) => {
            rows && !all_pure && terms.iter().flat_map(Term::roots).next().is_some()
        }
        Kind::Fixed(given) => !given.is_empty(),
        Kind::Sum { .. } => !is_summed(value),
        Kind::Mixed(_) => false,
    };
    let factor = |value: &Value, power: i32| -> Terms {
        match &value.kind {
            _ if value.pure && stands_for_itself(value) => {
                [Term::default().scaled(value.root, power)].into()
            }
            Kind::ByItem(_, terms) if power < 0 => collapsed(terms),
            Kind::ByItem(_, terms) => terms.clone(),
            Kind::Sum { terms, .. } if is_summed(value) => terms.clone(),
            _ => [Term::of(value.factor().unwrap_or_default())].into(),
        }
    };
    let own = |value: &Value| factor(value, 1);
    let not_zero = |values: &[&Value]| -> Terms {
        let all_zero = values.iter().all(|value| value.zero);
        values.iter().filter(|value| !value.zero || all_zero).flat_map(|value| own(value)).collect()
    };
    match by {
        By::Any => collapsed(&values.iter().flat_map(|value| own(value)).collect::<Terms>()),
        By::Sum => not_zero(values),
        By::First => {
            let others = values[1..].iter().flat_map(|value| own(value)).collect::<Terms>();
            products(&own(values[0]), &collapsed(&others))
        }
        By::Selection => {
            let given = collapsed(&own(values[0]));
            products(&not_zero(&values[1..]), &given)
        }
        By::Product | By::Quotient => {
            let power = if by == By::Product { 1 } else { -1 };
            let rest = values[1..].iter().map(|value| factor(value, power));
            rest.fold(factor(values[0], 1), |all, next| products(&all, &next))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_cancel_and_zeros_do_not_count() {
        let count = Root::Number(TensorIndex(3));
        let by_item = |zero| Value {
            kind: Kind::ByItem(Axis::of_items(0, 1), [Term::default()].into()),
            pure: false,
            zero,
            root: Root::Inside(0),
        };
        let number = Value { root: count, ..Value::new(Kind::Fixed([Root::Items].into()), true) };
        let divided = terms_of(&[&by_item(false), &number], By::Quotient, false);
        assert_eq!(divided, [Term::default().scaled(count, -1)].into());
        let once = [Term::default().scaled(count, 1)].into();
        assert_eq!(products(&divided, &once), [Term::default()].into());
        let counts = Root::Tensor(TensorIndex(4));
        let of_itself = Term::default().scaled(counts, 1).scaled(counts, -1);
        assert_eq!((of_itself.power(counts), of_itself.roots().next()), (0, Some(counts)));
        let sum = terms_of(&[&by_item(true), &by_item(false)], By::Sum, false);
        assert_eq!(sum, [Term::default()].into());
    }
}
