//! One call while it is recorded: takes the inputs, looks the call up or describes it, and promises
//! the results.
//!
//! `ops` opens a frame for every call of `Lazy<B>` that is recorded. Closing the frame adds the
//! call to the session.

pub(crate) mod forms;

use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use burn_backend::Backend;
use burn_ir::{
    BaseOperationIr, CustomOpIr, OperationIr, ShapeOpIr, TensorId, TensorIr, TensorStatus,
};
use firebox_trace::{Bytes, Call, Description, DescriptionIndex, TensorIndex, Use};
use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::kind::Kind;
use crate::record::call::forms::{Returned, TensorSlot};
use crate::record::describe::{Described, DescriptionClient};
use crate::record::known::{Form, Known, Sign};
use crate::record::session::{self, Session, hash_of};
use crate::record::values::{Frame, Instruction};
use crate::tensor::LazyTensor;

/// A call being recorded.
pub struct CallFrame<B: Backend> {
    name: &'static str,
    inputs: SmallVec<[Use; 2]>,
    outputs: SmallVec<[TensorIndex; 2]>,
    /// The device of the results. That of the first input, unless another one is set.
    pub(crate) device: Option<B::Device>,
    /// The hash of the backend, the method, its parameters, and the shapes, element types and
    /// ownership of its inputs.
    signature: FxHasher,
    /// Whether the call was looked up by its signature.
    looked_up: bool,
    /// The forms of the results.
    pub(crate) results: Vec<Option<Form>>,
    /// The numbers of the outputs in the description.
    local_outputs: Vec<u64>,
    /// Second owners of described inputs, so that the description sees an input the call does not
    /// own as shared.
    shared: Vec<Described<B>>,
}

fn session<B: Backend, R>(f: impl FnOnce(&mut Session<B>) -> R) -> R {
    session::with(f).expect("calls are recorded inside a recording")
}

/// The instruction of a call that may run again.
pub(crate) fn again<B: Backend, R: Returned<B>>(
    run: impl Fn(&mut Frame<'_, B>) -> R::Plain + Send + 'static,
) -> impl FnOnce(R::Slots) -> Instruction<B> {
    |slots| Instruction::Call(Box::new(move |frame| R::store(slots, run(frame), frame)))
}

/// The instruction of a call that runs once.
pub(crate) fn once<B: Backend, R: Returned<B>>(
    run: impl FnOnce(&mut Frame<'_, B>) -> R::Plain + Send + 'static,
) -> impl FnOnce(R::Slots) -> Instruction<B> {
    |slots| Instruction::Once(Box::new(move |frame| R::store(slots, run(frame), frame)))
}

impl<B: Backend> CallFrame<B> {
    /// Starts recording a call.
    pub(crate) fn open(name: &'static str) -> Self {
        let mut signature = FxHasher::default();
        TypeId::of::<B>().hash(&mut signature);
        name.hash(&mut signature);
        Self {
            name,
            inputs: SmallVec::new(),
            outputs: SmallVec::new(),
            device: None,
            signature,
            looked_up: false,
            results: Vec::new(),
            local_outputs: Vec::new(),
            shared: Vec::new(),
        }
    }

    /// Takes a tensor as the next input.
    pub(crate) fn input<K: Kind<B>>(&mut self, tensor: LazyTensor<B, K>) -> TensorSlot<K> {
        tensor.settle();
        if self.device.is_none() {
            self.device = Some(tensor.device());
        }
        let number = self.inputs.len() as u32;
        let signature = &mut self.signature;
        let used = session::<B, _>(|session| {
            let used = session.take(tensor);
            let info = session.trace.tensor(used.tensor);
            info.shape.hash(signature);
            info.dtype.hash(signature);
            used.last.hash(signature);
            used
        });
        self.inputs.push(used);
        TensorSlot { number, kind: std::marker::PhantomData }
    }

    /// Takes a parameter that is not a tensor.
    pub(crate) fn parameter<T: Sign + ?Sized>(&mut self, parameter: &T) {
        parameter.sign(&mut self.signature);
    }

    /// The same call, if it was described before.
    pub(crate) fn known(&mut self) -> Option<(DescriptionIndex, Arc<Known>)> {
        self.looked_up = true;
        let signature = self.signature.finish();
        session::<B, _>(|session| {
            let found = session.known_call(signature)?;
            let alike = |(input, (form, last)): (&Use, &(Form, bool))| {
                let info = session.trace.tensor(input.tensor);
                input.last == *last && info.shape == form.0 && info.dtype == form.1
            };
            let same = found.1.name == self.name
                && found.1.inputs.len() == self.inputs.len()
                && self.inputs.iter().zip(&found.1.inputs).all(alike);
            same.then_some(found)
        })
    }

    /// Starts describing the call.
    pub(crate) fn describe(&self) {
        session::<B, _>(|session| session.open_call(self.inputs.len()));
    }

    /// An input in the form the describing router takes.
    pub(crate) fn described<K>(&mut self, slot: &TensorSlot<K>) -> Described<B> {
        let device = self.device.clone().expect("there is an input");
        let used = self.inputs[slot.number as usize];
        let (shape, dtype) = session::<B, _>(|session| session.form(used.tensor));
        let id = TensorId::new(slot.number.into());
        let described = Described::new(id, shape, dtype, DescriptionClient::new(device));
        if !used.last {
            self.shared.push(described.clone());
        }
        described
    }

    /// Notes a described tensor as the next result.
    pub(crate) fn output(&mut self, described: Described<B>) {
        self.device.get_or_insert_with(|| described.client.device.clone());
        let mut ir = described.into_ir();
        if ir.id.value() < self.inputs.len() as u64 {
            // The description returns an input unchanged. The result is a tensor of its own all the
            // same.
            session::<B, _>(|session| {
                let shape = ir.shape.clone();
                let alias = ShapeOpIr::reshape(ir.clone(), shape, || session.next_local());
                ir = alias.out.clone();
                session.describe(OperationIr::BaseFloat(BaseOperationIr::Reshape(alias)));
            });
        }
        self.local_outputs.push(ir.id.value());
        self.results.push(Some((ir.shape, ir.dtype)));
    }

    /// Adds a new tensor as the next output. Returns its position as well.
    pub(crate) fn promise<K: Kind<B>>(&mut self, form: Form) -> (LazyTensor<B, K>, u32) {
        let device = self.device.clone().expect("a call has an input, or names a device");
        let (tensor, index) = session::<B, _>(|session| session.promise(form, device, self.name));
        self.outputs.push(index);
        (tensor, self.outputs.len() as u32 - 1)
    }

    /// Ends a described call. `run` will run it on the backend.
    pub(crate) fn close<R: Returned<B>>(
        mut self,
        described: R::Described,
        run: impl Fn(&mut Frame<'_, B>) -> R::Plain + Send + 'static,
    ) -> R {
        R::adopt(described, &mut self);
        let results = std::mem::take(&mut self.results);
        let description = session::<B, _>(|session| {
            let description = session.close_call(self.local_outputs.clone());
            if self.looked_up {
                let described = session.trace.descriptions[description.0 as usize].clone();
                let is_data = |it: &OperationIr| matches!(it, OperationIr::Init(_));
                let known = Arc::new(Known {
                    name: self.name,
                    inputs: self.forms_of_inputs(session),
                    has_data: described.operations.iter().any(is_data),
                    hash: hash_of(&described),
                    description: described,
                    results: results.clone(),
                });
                session.remember_call(self.signature.finish(), description, known);
            }
            description
        });
        self.finish(description, &results, again::<B, R>(run))
    }

    /// Ends a known call.
    pub(crate) fn close_known<R: Returned<B>>(
        self,
        (description, known): (DescriptionIndex, Arc<Known>),
        run: impl Fn(&mut Frame<'_, B>) -> R::Plain + Send + 'static,
    ) -> R {
        self.finish(description, &known.results, again::<B, R>(run))
    }

    /// Ends a call that burn-ir has no operation for, described by the forms of its results.
    /// `workspace` is what it takes while it runs, if known.
    pub(crate) fn close_custom<R: Returned<B>>(
        self,
        parameters: &str,
        outputs: &[Form],
        workspace: Option<Bytes>,
        instruction: impl FnOnce(R::Slots) -> Instruction<B>,
    ) -> R {
        let description = session::<B, _>(|session| {
            let inputs = self.forms_of_inputs(session).into_iter().zip(0..);
            let inputs = inputs.map(|(((shape, dtype), last), number)| TensorIr {
                id: TensorId::new(number),
                shape,
                status: if last { TensorStatus::ReadWrite } else { TensorStatus::ReadOnly },
                dtype,
            });
            let outputs = outputs.iter().zip(self.inputs.len() as u64..);
            let outputs: Vec<_> = outputs
                .map(|((shape, dtype), number)| {
                    TensorIr::uninit(TensorId::new(number), shape.clone(), *dtype)
                })
                .collect();
            let numbers = outputs.iter().map(|output| output.id.value()).collect();
            let id = format!("{}({parameters})", self.name);
            let operation = CustomOpIr { id, inputs: inputs.collect(), outputs };
            let operations = vec![OperationIr::Custom(operation)];
            let description = Description { operations, outputs: numbers, workspace };
            let hash = hash_of(&description);
            session.share(Arc::new(description), hash)
        });
        let results: Vec<_> = outputs.iter().cloned().map(Some).collect();
        self.finish(description, &results, instruction)
    }

    /// Promises the results and adds the call to the session.
    fn finish<R: Returned<B>>(
        mut self,
        description: DescriptionIndex,
        results: &[Option<Form>],
        instruction: impl FnOnce(R::Slots) -> Instruction<B>,
    ) -> R {
        let (result, slots) = R::promise(&mut results.iter(), &mut self);
        let Self { name, inputs, outputs, local_outputs, .. } = self;
        session::<B, _>(|session| {
            session.place_described(&local_outputs, &outputs);
            let call = Call { name: name.into(), inputs, outputs, description };
            session.push_call(call, instruction(slots));
        });
        result
    }

    fn forms_of_inputs(&self, session: &Session<B>) -> Vec<(Form, bool)> {
        let inputs = self.inputs.iter();
        inputs.map(|input| (session.form(input.tensor), input.last)).collect()
    }
}
