// Storage for pods of the test cluster: a directory on the pod's node. One runs on every node and
// looks after the volumes of its own, so a volume goes when its claim goes, as on a real cluster.
package main

import (
	"context"
	"os"
	"path/filepath"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

const (
	provisioner  = "hither.test/local-volumes"
	nodeLabel    = "kubernetes.io/hostname"
	selectedNode = "volume.kubernetes.io/selected-node"
)

// volumes makes and removes the directories of one node.
type volumes struct {
	node      string
	directory string
}

func main() {
	ctx := context.Background()
	config, err := rest.InClusterConfig()
	if err != nil {
		klog.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		klog.Fatal(err)
	}
	own := &volumes{node: os.Getenv("NODE_NAME"), directory: os.Args[1]}
	controller.NewProvisionController(
		ctx, client, provisioner, own, controller.LeaderElection(false),
	).Run(ctx)
}

func (v *volumes) ShouldProvision(_ context.Context, claim *core.PersistentVolumeClaim) bool {
	return claim.Annotations[selectedNode] == v.node
}

func (v *volumes) ShouldDelete(_ context.Context, volume *core.PersistentVolume) bool {
	return volume.Labels[nodeLabel] == v.node
}

func (v *volumes) Provision(
	_ context.Context, options controller.ProvisionOptions,
) (*core.PersistentVolume, controller.ProvisioningState, error) {
	path := filepath.Join(v.directory, options.PVName)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	// Whatever the umask is: any user's pod may write.
	if err := os.Chmod(path, 0o777); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	return &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{
			Name:   options.PVName,
			Labels: map[string]string{nodeLabel: v.node},
		},
		Spec: core.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   options.PVC.Spec.AccessModes,
			Capacity: core.ResourceList{
				core.ResourceStorage: options.PVC.Spec.Resources.Requests[core.ResourceStorage],
			},
			PersistentVolumeSource: core.PersistentVolumeSource{
				Local: &core.LocalVolumeSource{Path: path},
			},
			NodeAffinity: onlyOn(v.node),
		},
	}, controller.ProvisioningFinished, nil
}

func (v *volumes) Delete(_ context.Context, volume *core.PersistentVolume) error {
	return os.RemoveAll(filepath.Join(v.directory, volume.Name))
}

func onlyOn(node string) *core.VolumeNodeAffinity {
	return &core.VolumeNodeAffinity{Required: &core.NodeSelector{
		NodeSelectorTerms: []core.NodeSelectorTerm{{
			MatchExpressions: []core.NodeSelectorRequirement{{
				Key: nodeLabel, Operator: core.NodeSelectorOpIn, Values: []string{node},
			}},
		}},
	}}
}
