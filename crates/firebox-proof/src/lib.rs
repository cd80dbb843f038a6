//! Proves from recordings of a training step that the gradient of a batch is the sum over its
//! parts, and says by which weights, and what parts have to be given of the whole batch.
//!
//! [`prove`] compares the recording of a step on a batch with that of the same step on a part of
//! it, operation by operation. Each tensor is found to be fixed, by item, a sum over items, of the
//! batch alone, or mixed: there, items have met. What becomes of the gradients of parameters is the
//! proof. Nothing is computed.
//!
//! What a tensor is (`value.rs`) follows from what the operation that makes it does with the
//! dimensions of its operands (`rules.rs`), and is checked against the shapes of both recordings
//! (`follow.rs`). Independent operations may come in another order (`pairs.rs`).

mod follow;
mod given;
mod pairs;
mod rules;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use firebox_trace::{Category, Step, TensorIndex, Trace};

use crate::follow::{Follow, Meeting};
pub use crate::given::Given;
use crate::value::{Kind, Root, Term, Value};

/// The note that ends the cutting of the batch in a recording.
pub const CUT: &str = "the batch is cut";

/// A recorded step.
#[derive(Clone, Debug)]
pub struct Recording<'a> {
    /// What was recorded: first the batch is cut by slices, then comes the note [`CUT`], then the
    /// step. Parameters and their gradients have labels.
    pub trace: &'a Trace,
    /// The number of items of the step.
    pub items: usize,
    /// All tensors that existed before, with numbers that are the same in all recordings.
    pub inputs: Vec<(u64, TensorIndex)>,
    /// The results of the step besides gradients, such as its loss. Where parts are given numbers
    /// of the batch, or there are no gradients, they are given what makes these add up, too, if
    /// that is possible.
    pub outputs: Vec<TensorIndex>,
}

impl Recording<'_> {
    /// The gradients of parameters, by path: a parameter has one of each backward pass.
    fn gradients(&self) -> BTreeMap<(&str, usize), TensorIndex> {
        let (mut gradients, mut passes) = (BTreeMap::new(), BTreeMap::<&str, usize>::new());
        for (at, tensor) in (0..).map(TensorIndex).zip(&self.trace.tensors) {
            if let Some(label) =
                tensor.label.as_ref().filter(|it| it.category == Category::Gradient)
            {
                let pass = passes.entry(&label.name).or_default();
                gradients.insert((&*label.name, *pass), at);
                *pass += 1;
            }
        }
        gradients
    }
}

/// What host data in one recording is to that of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostData {
    /// The same.
    Same,
    /// The rows of the items of the part.
    Rows,
    /// Neither, or unknown.
    Other,
}

/// What a step is, as far as its recordings show.
#[derive(Clone, Debug, PartialEq)]
pub enum Proof {
    /// The gradient of the batch is a sum over its parts.
    Adds(Adds),
    /// Items depend on each other: no part knows its gradient.
    Mixed(Mixed),
    /// Nothing is proved, for this reason.
    Undecided(String),
}

/// How the gradients of parts add up to that of their batch: as means, as sums, or both, where no
/// gradient depends on the items or parts are given what scales it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adds {
    /// What parts have to be given of the whole batch for gradients that add up like means, by
    /// their numbers of items. Nothing for most losses. `None` if they cannot add up so.
    pub mean: Option<Vec<Given>>,
    /// The same for gradients that add up as they are.
    pub sum: Option<Vec<Given>>,
    /// The path of a parameter whose gradient has a summand that occurs once for each batch, such
    /// as a penalty. In a sum it would be counted once for each part.
    pub once: Option<String>,
    /// The tensors, of the batch and of the part, that are such summands. Where they are zero in
    /// all parts but one, sums add up. `None` if that would have another effect.
    pub once_in: Option<Vec<[TensorIndex; 2]>>,
    /// By what the gradients are divided where they add up like means, if that is one number.
    pub counts: Option<Counts>,
    /// Data of the host that became tensors of the two, and what that of the part is to that of the
    /// whole. It must be so in other batches, too.
    pub hosts: Vec<(TensorIndex, TensorIndex, HostData)>,
}

/// What a loss divides by: a sum over the items of the whole batch, such as its real tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Counts {
    /// The sum, a single number, in the recordings of the batch and of the part. If gradients are
    /// proportional to its reciprocal, batches weigh so much beside each other.
    pub sum: [TensorIndex; 2],
    /// All numbers that gradients depend on, and the power of the sum that they are proportional to
    /// then. It is to be checked, because a sum may have a floor.
    pub scales: Vec<(TensorIndex, i32)>,
}

impl Adds {
    /// Whether parts add up without being given anything.
    fn needs_nothing(&self) -> bool {
        let is_empty = |given: &Option<Vec<Given>>| given.as_ref().is_some_and(Vec::is_empty);
        is_empty(&self.mean) || is_empty(&self.sum)
    }
}

/// Where items meet.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixed {
    /// The operation, as a method of burn's backends.
    pub operation: String,
    /// Its position among the steps of the recording.
    pub at: usize,
    /// The module whose parameters were used last before it.
    pub module: Option<String>,
    /// What happens there.
    pub why: &'static str,
    /// The path of a parameter whose gradient depends on it, and how many do.
    pub parameter: String,
    /// How many gradients depend on mixed items.
    pub gradients: usize,
    /// Whether each item depends on others there. Items that are put in another order, or picked
    /// by their places, may come back to theirs.
    pub certain: bool,
}

impl fmt::Display for Mixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.operation)?;
        if let Some(module) = &self.module {
            write!(f, " behind `{module}`")?;
        }
        write!(f, " ({})", self.why)
    }
}

/// What the step on a batch is, given that on a part of it. `host` compares data of the host that
/// became these tensors of the two.
///
/// It holds for the part that was recorded: for parts of other sizes, with other branches or other
/// data of the host, it is to be asked again.
pub fn prove(
    whole: &Recording<'_>,
    part: &Recording<'_>,
    host: &dyn Fn(TensorIndex, TensorIndex) -> HostData,
) -> Proof {
    let has_reads =
        |of: &Recording<'_>| of.trace.steps.iter().any(|it| matches!(it, Step::Read(_)));
    if has_reads(whole) || has_reads(part) {
        return Proof::Undecided("the step reads values".to_owned());
    }
    if whole.items == part.items {
        return Proof::Undecided("the part is the whole".to_owned());
    }
    let follow = |takes_rows| Follow::run([whole, part], host, takes_rows);
    let first = match follow(false) {
        Ok(follow) => match judge(&follow, whole, part, true) {
            Proof::Adds(adds) if adds.needs_nothing() => return Proof::Adds(adds),
            Proof::Mixed(mixed) => return Proof::Mixed(mixed),
            proof => proof,
        },
        Err(why) => return Proof::Undecided(why),
    };
    // What numbers of the host are in is taken from the whole batch.
    match follow(true).map(|follow| judge(&follow, whole, part, false)) {
        Ok(Proof::Undecided(_)) | Err(_) => first,
        Ok(second) => second,
    }
}

/// `all`: whether all outputs must add up where there are no gradients.
fn judge(follow: &Follow<'_>, whole: &Recording<'_>, part: &Recording<'_>, all: bool) -> Proof {
    let (gradients, others) = (whole.gradients(), part.gradients());
    let has_any = !(gradients.is_empty() && whole.outputs.is_empty());
    if !gradients.keys().eq(others.keys()) || !has_any {
        return Proof::Undecided("not all parameters have gradients on both".to_owned());
    }
    let mut mixed: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    let (mut terms, mut once, mut given_once) = (BTreeSet::new(), None, BTreeSet::new());
    let mut alone = Vec::new();
    for (&(path, pass), gradient) in &gradients {
        let is_same = follow.to_other.get(gradient) == others.get(&(path, pass));
        let Some(value) = follow.value(*gradient).filter(|_| is_same) else {
            return Proof::Undecided(format!("the gradient of `{path}` is made otherwise"));
        };
        match &value.kind {
            Kind::Mixed(met) => mixed.entry(*met).or_default().push(path),
            Kind::Sum { terms: own, once: also, .. } => {
                terms.extend(own.iter().cloned());
                if *also {
                    once.get_or_insert_with(|| path.to_owned());
                }
            }
            Kind::Fixed(_) if value.zero => {}
            Kind::Fixed(given) => {
                once.get_or_insert_with(|| path.to_owned());
                alone.push(*gradient);
                given_once.extend(given.iter().copied());
            }
            Kind::ByItem(..) => {
                return Proof::Undecided(format!("the gradient of `{path}` has items"));
            }
        }
    }
    let order = |met: &usize| (!follow.met[*met].is_certain(), follow.met[*met].step);
    let first = mixed.keys().copied().min_by_key(order);
    if let Some(name) = follow.without_rule.as_ref().filter(|_| first.is_some()) {
        return Proof::Undecided(format!("what `{name}` does with items is not known"));
    }
    if let Some(met) = first {
        let certain = follow.met[met].is_certain();
        let Meeting { step, name, why } = follow.met[met].clone();
        return Proof::Mixed(Mixed {
            operation: name,
            at: step,
            module: follow.module_before(step),
            why,
            parameter: mixed[&met][0].to_owned(),
            gradients: mixed.values().map(Vec::len).sum(),
            certain,
        });
    }
    if let (true, Some(call)) = (terms.iter().any(|term| term.assumed), &follow.assumed) {
        let why = "has numbers of the host, which may be others in other batches";
        return Proof::Undecided(format!("`{call}` {why}"));
    }
    let mut adds = match added(follow, &terms, (&once, &given_once)) {
        Ok(adds) => adds,
        Err(why) => return Proof::Undecided(why.to_owned()),
    };
    if gradients.is_empty() {
        let of = |output: &&TensorIndex| {
            let kind = follow.value(**output).map(|value| &value.kind);
            matches!(kind, Some(Kind::Sum { once: true, .. }))
        };
        adds.once = whole.outputs.iter().find(of).map(|_| "an output".to_owned());
    }
    if adds.once.is_some() {
        adds.once_in = follow.once(alone, &whole.outputs);
    }
    if adds.needs_nothing() && !gradients.is_empty() {
        return Proof::Adds(adds);
    }
    // What depends on given numbers in another way would be less like the whole's than it is.
    let is_other = |output: &TensorIndex| match follow.value(*output).map(|value| &value.kind) {
        Some(Kind::Mixed(_)) => true,
        Some(Kind::ByItem(_, terms)) => terms.iter().any(|term| term.roots().next().is_some()),
        _ => false,
    };
    if gradients.is_empty() && whole.outputs.iter().any(is_other) {
        return Proof::Undecided("an output depends on several items otherwise".to_owned());
    }
    let of_output = |output: &TensorIndex| match follow.value(*output) {
        Some(Value { kind: Kind::Sum { terms, .. }, pure: false, .. }) => {
            Some(terms).filter(|terms| !terms.iter().any(|term| term.assumed))
        }
        _ => None,
    };
    let mut with = [terms.clone(), terms];
    for own in whole.outputs.iter().filter_map(of_output) {
        let mut added_up = 0;
        for (at, with) in with.iter_mut().enumerate() {
            let both = &*with | own;
            let Ok(more) = added(follow, &both, (&once, &given_once)) else { continue };
            let (now, more) =
                if at == 0 { (&mut adds.mean, more.mean) } else { (&mut adds.sum, more.sum) };
            if now.is_some() && more.is_some() {
                (*now, *with) = (more, both);
                added_up += 1;
            }
        }
        if gradients.is_empty() && all && added_up == 0 {
            return Proof::Undecided("an output does not add up".to_owned());
        }
    }
    Proof::Adds(adds)
}

/// How terms add up, beside what occurs `once` and is given these of the whole batch.
fn added(
    follow: &Follow<'_>,
    terms: &BTreeSet<Term>,
    (once, given_once): (&Option<String>, &BTreeSet<Root>),
) -> Result<Adds, &'static str> {
    let power = |term: &Term| term.power(Root::Items);
    if terms.iter().any(|term| !matches!(power(term), 0 | -1)) {
        return Err("a gradient is scaled by another power of the number of items");
    }
    let roots: BTreeSet<Root> =
        terms.iter().flat_map(Term::roots).filter(|root| *root != Root::Items).collect();
    let roots = &roots | given_once;
    if roots.contains(&Root::Items) || terms.iter().any(|term| term.given.contains(&Root::Items)) {
        return Err("a gradient depends on the number of items");
    }
    let mut through = terms.iter().flat_map(|term| &term.through);
    if through.any(|sum| roots.contains(sum)) {
        return Err("a number of the batch is part of a sum and scales another");
    }
    // With these exponents of a part's share of the items.
    let given = |shares: &BTreeMap<Root, i32>| -> Result<Vec<Given>, &'static str> {
        let share = |root: &Root| shares.get(root).copied().unwrap_or(0);
        roots.iter().map(|root| self::given(follow, *root, share(root))).collect()
    };
    let is_sum = terms.iter().all(|term| power(term) == 0);
    let sum = is_sum.then(|| given(&BTreeMap::new())).transpose()?;
    // Sums become means by what scales them.
    let scales = |term: &Term| -> Option<(Root, i32)> {
        let only = |root: &Root| {
            let power = term.power(*root);
            *root != Root::Items
                && matches!(power, -1 | 1)
                && !given_once.contains(root)
                && terms.iter().all(|other| match self::power_of(other, *root) {
                    Some(0) => true,
                    Some(of) => of == power && other.power(Root::Items) == 0,
                    None => false,
                })
        };
        term.scale.keys().find(|root| only(root)).map(|root| (*root, -term.power(*root)))
    };
    let sums: Vec<&Term> = terms.iter().filter(|term| power(term) == 0).collect();
    let shares: Option<BTreeMap<Root, i32>> = sums.iter().map(|term| scales(term)).collect();
    let has_one = |term: &&Term, shares: &BTreeMap<Root, i32>| {
        term.scale.keys().filter(|root| shares.contains_key(root)).count() == 1
    };
    let shares = shares.filter(|shares| sums.iter().all(|term| has_one(term, shares)));
    let is_all = |shares: &BTreeMap<Root, i32>| {
        sums.len() == terms.len() && roots.iter().all(|root| shares.contains_key(root))
    };
    let counts = shares.as_ref().filter(|shares| is_all(shares)).and_then(|shares| {
        let scales = shares.iter().map(|(root, share)| match root {
            Root::Number(tensor) | Root::Tensor(tensor) => Some((*tensor, *share)),
            Root::Items | Root::Inside(_) => None,
        });
        let scales: Vec<(TensorIndex, i32)> = scales.collect::<Option<_>>()?;
        let sum = follow.sum_behind(scales.iter().map(|(tensor, _)| *tensor).collect())?;
        Some(Counts { sum: [sum, *follow.to_other.get(&sum)?], scales })
    });
    let mean = shares.map(|shares| given(&shares)).transpose()?;
    match mean.is_none() && sum.is_none() {
        true => Err("a sum over items stands beside what is no sum"),
        false => Ok(Adds {
            mean,
            sum,
            once: once.clone(),
            once_in: None,
            counts,
            hosts: follow.hosts.clone(),
        }),
    }
}

/// The exponent with which a root scales a term. `None` if the term depends on it otherwise.
fn power_of(term: &Term, root: Root) -> Option<i32> {
    (!term.given.contains(&root)).then(|| term.power(root))
}

fn given(follow: &Follow<'_>, root: Root, share: i32) -> Result<Given, &'static str> {
    let unknown = "a number of the host follows from the batch";
    let (Root::Number(whole) | Root::Tensor(whole)) = root else { return Err(unknown) };
    let part = *follow.to_other.get(&whole).ok_or(unknown)?;
    let value = follow.value(whole).ok_or(unknown)?;
    let rows = match value.axis() {
        Some(axis) if axis.outer == 1 => Some((axis.dim, axis.inner)),
        Some(_) => return Err("a tensor of the batch has its items in several rounds"),
        None => None,
    };
    Ok(Given { whole, part, rows, share })
}
