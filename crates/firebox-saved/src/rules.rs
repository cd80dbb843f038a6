//! The numbers of a file that follow from sizes: each rule once.

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};

use crate::error::Irregular;
use crate::rule::{Rule, Sizes};

/// The rules of a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Rules(IndexSet<Rule, FxBuildHasher>);

/// A number of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Number {
    /// The same for all sizes.
    Same(u64),
    /// By this rule.
    By(u32),
}

impl Rules {
    pub(crate) fn add(&mut self, rule: Rule) -> u32 {
        self.0.insert_full(rule).0 as u32
    }

    /// The number that a rule gives. `None` if there is no such rule, or it gives none.
    pub(crate) fn at(&self, rule: u32, sizes: &Sizes) -> Option<i64> {
        self.0.get_index(rule as usize)?.at(sizes)
    }

    /// The number that is `values` at `sizes`.
    pub(crate) fn number(&mut self, values: &[u64], sizes: &[Sizes]) -> Result<Number, Irregular> {
        if values.iter().all(|value| *value == values[0]) {
            return Ok(Number::Same(values[0]));
        }
        let signed: Result<Vec<i64>, _> =
            values.iter().map(|value| i64::try_from(*value)).collect();
        let signed = signed.map_err(|_| Irregular::Structure)?;
        let rule = Rule::fit(&signed, sizes).ok_or(Irregular::Number(signed))?;
        Ok(Number::By(self.add(rule)))
    }

    /// A number for these sizes.
    pub(crate) fn value(&self, number: Number, sizes: &Sizes) -> Option<u64> {
        match number {
            Number::Same(value) => Some(value),
            Number::By(rule) => u64::try_from(self.at(rule, sizes)?).ok(),
        }
    }
}
