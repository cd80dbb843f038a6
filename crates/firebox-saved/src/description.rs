//! What a call does, for every split: burn's operations as a tree, in which numbers that follow
//! from sizes are replaced by rules.
//!
//! burn-ir offers no way to walk the numbers of an operation, but its operations can be serialized.
//! The trees of several splits are compared node by node.

use burn_ir::OperationIr;
use ciborium::Value;
use serde::Serialize;

use crate::error::Irregular;
use crate::rule::{Rule, Sizes};
use crate::rules::Rules;

/// CBOR's tag for the number of a rule. From the range that is free to use.
const RULE: u64 = 0x6669_7265;

/// The deepest tree: burn's operations have fewer than ten levels.
const DEEPEST: usize = 64;

/// Compares the operations of the same call in several traces.
pub(crate) fn generalize(
    samples: &[&[OperationIr]],
    sizes: &[Sizes],
    rules: &mut Rules,
) -> Result<Vec<u8>, Irregular> {
    let trees: Vec<Value> = samples.iter().map(tree).collect();
    let merged = merge(&trees.iter().collect::<Vec<_>>(), sizes, rules)?;
    let mut bytes = Vec::new();
    ciborium::into_writer(&merged, &mut bytes).expect("a vector takes all bytes");
    Ok(bytes)
}

/// The operations for these sizes. `None` if the bytes are of no operations.
pub(crate) fn specialize(bytes: &[u8], sizes: &Sizes, rules: &Rules) -> Option<Vec<OperationIr>> {
    let mut tree: Value = ciborium::de::from_reader_with_recursion_limit(bytes, DEEPEST).ok()?;
    fill(&mut tree, sizes, rules)?;
    tree.deserialized().ok()
}

fn tree(value: &(impl Serialize + ?Sized)) -> Value {
    Value::serialized(value).expect("burn-ir's operations serialize")
}

/// One tree for all samples.
fn merge(trees: &[&Value], sizes: &[Sizes], rules: &mut Rules) -> Result<Value, Irregular> {
    let first = trees[0];
    if trees.iter().all(|tree| *tree == first) {
        return Ok(first.clone());
    }
    match first {
        Value::Integer(_) => {
            let number = |tree: &&Value| i64::try_from(i128::from(tree.as_integer()?)).ok();
            let numbers: Option<Vec<i64>> = trees.iter().map(number).collect();
            let numbers = numbers.ok_or(Irregular::Structure)?;
            let rule = Rule::fit(&numbers, sizes).ok_or(Irregular::Number(numbers))?;
            Ok(Value::Tag(RULE, Box::new(Value::from(rules.add(rule)))))
        }
        // The value of a scalar, such as one over the number of items, takes no memory.
        Value::Float(_) => Ok(first.clone()),
        Value::Array(items) => {
            let arrays: Option<Vec<_>> = trees.iter().map(|tree| tree.as_array()).collect();
            let arrays = arrays.ok_or(Irregular::Structure)?;
            if arrays.iter().any(|array| array.len() != items.len()) {
                return Err(Irregular::Structure);
            }
            let at = |at: usize| arrays.iter().map(|array| &array[at]).collect::<Vec<_>>();
            let merged = (0..items.len()).map(|item| merge(&at(item), sizes, rules));
            Ok(Value::Array(merged.collect::<Result<_, _>>()?))
        }
        Value::Map(fields) => {
            let maps: Option<Vec<_>> = trees.iter().map(|tree| tree.as_map()).collect();
            let maps = maps.ok_or(Irregular::Structure)?;
            let keys = |map: &[(Value, Value)]| map.iter().map(|(key, _)| key.clone()).collect();
            let own: Vec<Value> = keys(fields);
            if maps.iter().any(|map| keys(map) != own) {
                return Err(Irregular::Structure);
            }
            let at = |at: usize| maps.iter().map(|map| &map[at].1).collect::<Vec<_>>();
            let merged = own.into_iter().enumerate();
            let merged = merged.map(|(at_, key)| Ok((key, merge(&at(at_), sizes, rules)?)));
            Ok(Value::Map(merged.collect::<Result<_, _>>()?))
        }
        _ => Err(Irregular::Structure),
    }
}

/// Replaces rules by numbers.
fn fill(tree: &mut Value, sizes: &Sizes, rules: &Rules) -> Option<()> {
    match tree {
        Value::Tag(RULE, number) => {
            let rule = u32::try_from(number.as_integer()?).ok()?;
            *tree = Value::from(rules.at(rule, sizes)?);
        }
        Value::Tag(..) => return None,
        Value::Array(items) => {
            for item in items {
                fill(item, sizes, rules)?;
            }
        }
        Value::Map(fields) => {
            for (_, value) in fields {
                fill(value, sizes, rules)?;
            }
        }
        _ => {}
    }
    Some(())
}
