//! Descriptions of calls in the terms of a replay: its tensor numbers and its target's element types.
//!
//! A [`Description`](firebox_trace::Description) numbers its tensors for itself, so that calls can share it, and has
//! the element types of the backend that recorded it. burn-ir offers no way to walk the tensors of an operation and
//! change them, but its operations can be serialized; so a description is turned into a tree once, and each call makes
//! its operations from the tree.

use burn_ir::{OperationIr, TensorId};
use burn_std::{BoolStore, DType};
use serde::Deserialize;
use serde_json::{Value, json};

/// From the element types of a recording to those of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    /// How the target stores booleans.
    pub(crate) bools: BoolStore,
    /// The integers that a recording has by default, and those that the target has.
    pub(crate) ints: Option<(DType, DType)>,
}

impl Types {
    /// The element type of the target.
    pub(crate) fn translate(&self, dtype: DType) -> DType {
        match (dtype, self.ints) {
            (DType::Bool(_), _) => DType::Bool(self.bools),
            (dtype, Some((from, to))) if dtype == from => to,
            (dtype, _) => dtype,
        }
    }
}

/// The operations of a description, ready to be numbered.
pub(crate) struct Template {
    operations: Vec<Tree>,
}

/// An operation as a tree, and the numbers that its tensors have in the description, in the order in which a walk meets them.
/// The numbers in the tree are those of the latest call: to write over them costs less than to copy the tree.
struct Tree {
    root: Value,
    tensors: Vec<TensorId>,
}

impl Template {
    pub(crate) fn new(operations: &[OperationIr], types: &Types) -> Self {
        let tree = |operation| {
            let mut tree = serde_json::to_value(operation).expect("burn-ir's operations serialize");
            translate(&mut tree, types);
            let mut tensors = Vec::new();
            each_tensor(&mut tree, &mut |id| {
                tensors.push(TensorId::deserialize(&*id).expect("a tensor has an id"));
            });
            Tree { root: tree, tensors }
        };
        Self { operations: operations.iter().map(tree).collect() }
    }

    /// The operations with tensor `id` renamed to `number(id)`.
    pub(crate) fn number(
        &mut self,
        mut number: impl FnMut(TensorId) -> TensorId,
    ) -> impl Iterator<Item = OperationIr> {
        self.operations.iter_mut().map(move |Tree { root, tensors }| {
            let mut tensors = tensors.iter();
            each_tensor(root, &mut |id| {
                let tensor = tensors.next().expect("every walk meets the same tensors");
                *id = json!(number(*tensor));
            });
            OperationIr::deserialize(&*root).expect("what was serialized can be read")
        })
    }
}

fn translate(tree: &mut Value, types: &Types) {
    if let Some((from, to)) = types.ints
        && *tree == json!(from)
    {
        *tree = json!(to);
    }
    match tree {
        Value::Array(items) => items.iter_mut().for_each(|item| translate(item, types)),
        Value::Object(fields) => {
            if fields.len() == 1
                && let Some((key, value)) = fields.iter_mut().next()
            {
                match key.as_str() {
                    "Bool" if value.is_string() => *value = json!(types.bools),
                    // JSON has no infinity; what a scalar is does not matter to the memory.
                    "Float" if value.is_null() => *value = json!(0.0),
                    _ => {}
                }
            }
            fields.values_mut().for_each(|value| translate(value, types));
        }
        _ => {}
    }
}

/// Calls `visit` with the number of every tensor.
fn each_tensor(tree: &mut Value, visit: &mut impl FnMut(&mut Value)) {
    match tree {
        Value::Array(items) => items.iter_mut().for_each(|item| each_tensor(item, visit)),
        Value::Object(fields) => {
            let is_tensor =
                ["shape", "status", "dtype"].iter().all(|key| fields.contains_key(*key));
            if is_tensor && let Some(id) = fields.get_mut("id") {
                visit(id);
            } else {
                fields.values_mut().for_each(|value| each_tensor(value, visit));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_ir::{
        BaseOperationIr, CastOpIr, FloatOperationIr, MaskFillOpIr, ScalarIr, TensorIr, TensorStatus,
    };

    const GPU: Types = Types { bools: BoolStore::U8, ints: Some((DType::I64, DType::I32)) };

    fn tensor(id: u64, dtype: DType) -> TensorIr {
        let status = TensorStatus::ReadOnly;
        TensorIr { id: TensorId::new(id), shape: [2, 3].into(), status, dtype }
    }

    fn translated(operation: OperationIr, types: &Types) -> OperationIr {
        let mut template = Template::new(&[operation], types);
        let mut operations = template.number(|id| TensorId::new(id.value() + 100));
        operations.next().expect("one operation")
    }

    #[test]
    fn numbers_and_types_are_the_targets() {
        let bools = DType::Bool(BoolStore::Native);
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, bools),
            value: ScalarIr::Float(-2.5),
            out: tensor(2, DType::F32),
        }));
        let expected = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(100, DType::F32),
            mask: tensor(101, DType::Bool(BoolStore::U8)),
            value: ScalarIr::Float(-2.5),
            out: tensor(102, DType::F32),
        }));
        assert_eq!(translated(operation, &GPU), expected);
    }

    #[test]
    fn integers_change_only_where_the_default_does() {
        let cast = |from, to| {
            let (input, out) = (tensor(0, from), tensor(1, to));
            OperationIr::Float(DType::F32, FloatOperationIr::IntoInt(CastOpIr { input, out }))
        };
        let out = |types: &Types| {
            let operation = translated(cast(DType::F32, DType::I64), types);
            operation.outputs().next().expect("an output").dtype
        };
        assert_eq!(out(&GPU), DType::I32);
        assert_eq!(out(&Types { ints: None, ..GPU }), DType::I64);
    }

    #[test]
    fn an_infinite_scalar_survives_as_some_number() {
        let operation = OperationIr::BaseFloat(BaseOperationIr::MaskFill(MaskFillOpIr {
            tensor: tensor(0, DType::F32),
            mask: tensor(1, DType::Bool(BoolStore::U8)),
            value: ScalarIr::Float(f64::NEG_INFINITY),
            out: tensor(2, DType::F32),
        }));
        let names: Vec<u64> =
            translated(operation, &GPU).nodes().iter().map(|tensor| tensor.id.value()).collect();
        assert_eq!(names, [100, 101, 102]);
    }
}
